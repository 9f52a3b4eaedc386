"""Roles are switched under load, again and again: every answer is the undisturbed one, and new-role work is taken at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, running, wait_until
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Clients, prepare
from tests.faults.soak import MODEL
from tests.unit.engine.model_folders import write_config

NUM_SWITCHES = 60
NUM_CLIENTS = 8
OLD_WORK_S = 0.5
"""Short: decodes that a switch interrupts are moved, not only finished."""
ANSWERS_BETWEEN = 2
SETTINGS = {"engine.threads": "1"}
MODELS = {
    "smollm2": {"kv.memory_bytes": str(256 * 1024 * 1024)},
    "small": {"model.load_format": "random", "model.name": "demo", "kv.num_blocks": "600"},
}
"""Settings by model: the demo, and random weights with which a minute holds many more requests."""
ROUND = (("decode", 1, "prefill"), ("prefill", 1, "decode"), ("prefill", 0, "decode"), ("decode", 0, "prefill"))
"""Who of which role (by id) becomes what: 1P3D and 3P1D come about in turn."""


@pytest.fixture(params=MODELS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    model = str(write_config(tmp_path / "model", **MODEL)) if request.param == "small" else "demo"
    with running(tmp_path, prefill=2, decode=2, model=model, settings=SETTINGS | MODELS[request.param]) as cluster:
        yield cluster


@pytest.mark.slow
async def test_sixty_switches_under_load_lose_nothing(cluster: Cluster, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    limits = httpx.Limits(max_connections=64)
    told_s: list[float] = []
    seen_s: list[float] = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        questions = await prepare(client, 1, 16, (16, 48))
        clients = Clients(client, questions, Random(1), NUM_CLIENTS)
        clients.start()
        for index in range(NUM_SWITCHES):
            before = clients.num_answers
            await asyncio.to_thread(
                wait_until, lambda before=before: clients.num_answers >= before + ANSWERS_BETWEEN or clients.failures, 60, "answers go on"
            )
            old, place, new = ROUND[index % len(ROUND)]
            worker = await asyncio.to_thread(cluster.worker, old, place)
            began = time.monotonic()
            reply = await client.post(f"/admin/workers/{worker['id']}/role", json={"role": new, "deadline_s": OLD_WORK_S})
            seen_s.append(time.monotonic() - began)
            assert reply.status_code == 200, reply.text
            told_s.append(reply.json()["seconds"])
        await clients.stop()
        moves = {reason: cluster.metric(cluster.url, "pd_serve_moves_total", reason=reason) for reason in ("draining", "transfer_failed")}
    figures = {
        "switches": len(told_s),
        "answers": clients.num_answers,
        "lost": len(clients.failures),
        "moved": sum(moves.values()),
        "told_ms": _spread(told_s),
        "with_http_ms": _spread(seen_s),
    }
    record_property("figures", figures)
    with capsys.disabled():
        print(f"\nrole switches: {figures}")
    assert not clients.failures, clients.failures[0]
    assert len({worker["incarnation"] for worker in cluster.workers()}) == 4
    assert cluster.metric(cluster.url, "pd_serve_role_switches_total", reason="admin") == NUM_SWITCHES
    cluster.assert_clean(timeout_s=30)


def _spread(seconds: list[float]) -> str:
    in_order = sorted(1e3 * value for value in seconds)
    return f"p50 {statistics.median(in_order):.1f}, p95 {in_order[int(0.95 * len(in_order))]:.1f}, most {in_order[-1]:.1f}"
