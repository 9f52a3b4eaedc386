"""Two thousand requests with known answers, each transfer's KV digested on both sides: as right at the end as at the beginning (F14).

The answers are those of one colocated worker with the same random weights. The pools are too small for what is asked, so blocks are
evicted, transferred again and reused all the time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, running
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Answer, RefusedError, ask, draw_bodies
from tests.unit.engine.model_folders import write_config

NUM_REQUESTS = 2000
WINDOW = 100
NUM_AT_ONCE = 12
SHAPE: dict[str, Any] = {"vocab_size": 20_480, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 1024}
SETTINGS = {
    "model.load_format": "random",
    "model.name": "demo",
    "transport.verify": "true",
    "kv.num_blocks": "160",
    "engine.threads": "1",
}
SPOILT = ("transfer_failed", "peer_lost", "timeout", "engine_error", "refused")
"""Moves for want of memory are in good order; these are not, while nobody disturbs the cluster."""


async def answers(cluster: Cluster, bodies: Sequence[dict[str, Any]]) -> list[Answer | None]:
    """In order of asking; None where there was none."""
    slots = asyncio.Semaphore(NUM_AT_ONCE)
    limits = httpx.Limits(max_connections=2 * NUM_AT_ONCE)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:

        async def one(body: dict[str, Any]) -> Answer | None:
            async with slots:
                try:
                    return (await ask(client, body)).answer
                except RefusedError as error:
                    print(error)
                    return None

        return await asyncio.gather(*(one(body) for body in bodies))


def right_per_window(given: Sequence[Answer | None], expected: Sequence[Answer | None], window: int = WINDOW) -> list[int]:
    """Answers that are as expected, of each `window` in a row."""
    rights = [answer is not None and answer == known for answer, known in zip(given, expected, strict=True)]
    return [sum(rights[start : start + window]) for start in range(0, len(rights), window)]


def test_a_decaying_system_is_noticed() -> None:
    known = [Answer(str(number), "", "length", 1, 1) for number in range(400)]
    given: list[Answer | None] = [*known[:350], *known[:50]]
    assert right_per_window(known, known) == [100] * 4
    assert right_per_window(given, known) == [100, 100, 100, 50]
    assert right_per_window([None] * 100, known[:100]) == [0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_answers_are_as_right_at_the_end_as_at_the_beginning(tmp_path: Path) -> None:
    model = str(write_config(tmp_path / "model", **SHAPE))
    bodies = draw_bodies(14, NUM_REQUESTS, max_tokens=(4, 24))
    with running(tmp_path / "one", prefill=0, decode=0, colocated=1, model=model, settings=SETTINGS) as colocated:
        expected = asyncio.run(answers(colocated, bodies))
    assert None not in expected
    with running(tmp_path / "many", prefill=2, decode=2, model=model, settings=SETTINGS) as cluster:
        given = asyncio.run(answers(cluster, bodies))
        moves = {reason: int(cluster.metric(cluster.url, "pd_serve_moves_total", reason=reason)) for reason in (*SPOILT, "preempted")}
        addresses = [worker["address"] for worker in cluster.workers()]
        transferred = sum(cluster.metric(address, "pd_serve_kv_transfer_bytes_total") for address in addresses)
        stale = sum(int(cluster.metric(address, "pd_serve_stale_records_total")) for address in addresses)
    rights = right_per_window(given, expected)
    figures = {"right_per_window": rights, "moves": moves, "stale_records": stale, "transferred_mib": round(transferred / 2**20)}
    print(json.dumps(figures))
    assert rights == [WINDOW] * (NUM_REQUESTS // WINDOW)
    assert not any(moves[reason] for reason in SPOILT), moves
    assert stale == 0
    assert transferred > 0
