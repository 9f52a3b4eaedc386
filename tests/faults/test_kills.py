"""SIGKILL of any process of any worker at any moment costs no answer, and no worker of a kind left is said so in good order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, running, wait_until
from tests.faults.kills import CLEAN_TIMEOUT_S, RANDOM, campaign, draw_kills
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, check, prepare
from tests.faults.mixed_load import ask as ask_fully
from tests.faults.soak import MODEL
from tests.unit.engine.model_folders import write_config

QUEUE_TIMEOUT_S = 1.0
MAX_QUEUED = 4


def test_kills_are_drawn_from_the_seed_and_are_of_every_kind() -> None:
    assert draw_kills(5, 30) == draw_kills(5, 30) != draw_kills(6, 30)
    assert len({(kill.role, kill.victim) for kill in draw_kills(5, 6)}) == 6


def test_a_few_kills_cost_no_answer(tmp_path: Path) -> None:
    report = campaign(tmp_path, seed=11, num_kills=3, model=write_config(tmp_path / "model", **MODEL))
    print(report)
    assert report.num_kills == 3
    assert report.num_answers > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_cost_no_answer(tmp_path: Path) -> None:
    report = campaign(tmp_path, seed=100, num_kills=100)
    print(report)
    assert report.num_kills == 100
    assert report.moves["peer_lost"] > 50


# ---- none of a kind left, until it has started again


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = {"router.queue_timeout_s": str(QUEUE_TIMEOUT_S), "router.max_queued_requests": str(MAX_QUEUED), "worker.heartbeat_s": "0.5"}
    folder = tmp_path_factory.mktemp("pair")
    model = write_config(folder / "model", **MODEL)
    with running(folder, model=str(model), restart=True, settings=settings | RANDOM) as cluster:
        yield cluster
        wait_until(cluster._ready, 60, "everything is back")


def client_of(cluster: Cluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=64))


def is_gone(cluster: Cluster, victim: dict[str, Any]) -> bool:
    return victim["incarnation"] not in {worker["incarnation"] for worker in cluster.workers()}


async def test_without_a_prefill_worker_prompts_are_prefilled_where_they_decode(pair: Cluster) -> None:
    async with client_of(pair) as client:
        questions = await prepare(client, 3, 6)
        asked = [asyncio.create_task(ask_fully(client, question.body)) for question in questions]
        await asyncio.sleep(0.05)
        victim = await asyncio.to_thread(pair.kill_worker, "prefill")
        await asyncio.to_thread(wait_until, lambda: is_gone(pair, victim), 20, "the dead one is gone")
        for question in questions:
            check(question, await ask_fully(client, question.body))
        for question, task in zip(questions, asked, strict=True):
            check(question, await task)
    assert pair.metric(pair.url, "pd_serve_routing_decisions_total", kind="local", reason="no_prefill_worker") >= 1
    await asyncio.to_thread(wait_until, pair._ready, 60, "prefill is back")
    pair.assert_clean(CLEAN_TIMEOUT_S)


async def test_without_a_decode_worker_requests_wait_and_are_then_sent_away(pair: Cluster) -> None:
    async with client_of(pair) as client:
        (question, *_) = await prepare(client, 4, 1)
        body = question.body | {"stream": False}
        body.pop("stream_options", None)
        victim = await asyncio.to_thread(pair.kill_worker, "decode")
        await asyncio.to_thread(wait_until, lambda: is_gone(pair, victim), 20, "the dead one is gone")
        began = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(MAX_QUEUED + 3)))
        lasted = asyncio.get_running_loop().time() - began
        assert sorted(reply.status_code for reply in replies) == [429] * 3 + [503] * MAX_QUEUED
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
        assert lasted >= QUEUE_TIMEOUT_S
        await asyncio.to_thread(wait_until, pair._ready, 60, "decode is back")
        check(question, await ask_fully(client, question.body))
    pair.assert_clean(CLEAN_TIMEOUT_S)
