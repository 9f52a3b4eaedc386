"""Workers and routers that are stopped and replaced in good order, and a router that is not: nothing is lost, nothing stays held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from tests.cluster import wait_until
from tests.faults.chaos import DRAINED, is_listening, num_held_at
from tests.faults.clients import LeavingClient, ask
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Clients, prepare
from tests.faults.separate import SeparateCluster, running_separately
from tests.faults.soak import MODEL
from tests.unit.engine.model_folders import write_config

DRAIN_DEADLINE_S = 20.0
SETTINGS = {
    "model.load_format": "random",
    "model.name": "demo",
    "kv.num_blocks": "600",
    "engine.max_batch_tokens": "128",
    "worker.heartbeat_s": "0.5",
    "worker.drain_deadline_s": str(DRAIN_DEADLINE_S),
}
DRAIN_AT_ONCE_S = 0.2
NUM_TOKENS = 600
"""More than can be decoded within that."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateCluster]:
    folder = tmp_path_factory.mktemp("drain")
    model = write_config(folder / "model", **MODEL)
    with running_separately(folder, prefill=2, decode=2, model=str(model), settings=SETTINGS) as cluster:
        yield cluster


def prompt_of(length: int, salt: int) -> list[int]:
    return [(salt * 7919 + index * 104729) % 20_000 + 100 for index in range(length)]


def ended_well(cluster: SeparateCluster, name: str, timeout_s: float) -> float:
    """Seconds until the process, which has been told to end, did so in good order and with nothing held."""
    code, seconds = cluster.wait_exit(name, timeout_s)
    assert code == 0, cluster.log
    assert DRAINED in cluster.last_words(name)
    return seconds


def decoding(cluster: SeparateCluster) -> dict[str, int]:
    """Sequences that each decode worker runs, as of one moment."""
    return {worker["id"]: worker["running"] for worker in cluster.workers() if worker["role"] == "decode"}


@pytest.mark.slow
async def test_rolling_restart_of_every_worker_under_load_loses_nothing(cluster: SeparateCluster, record_property: Any) -> None:
    limits = httpx.Limits(max_connections=64)
    drains: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        questions = await prepare(client, 1, 20, (16, 120))
        clients = Clients(client, questions, Random(1))
        clients.start()
        for name in cluster.worker_names:
            before = clients.num_answers
            await asyncio.to_thread(wait_until, lambda before=before: clients.num_answers >= before + 10, 20, "answers go on")
            cluster.processes[name].terminate()
            drains[name] = await asyncio.to_thread(ended_well, cluster, name, DRAIN_DEADLINE_S + 5)
            cluster.start_process(name)
            await asyncio.to_thread(cluster.wait_whole)
        await clients.stop()
    record_property("figures", {"drain_s": drains, "answers": clients.num_answers})
    assert not clients.failures, clients.failures[0]
    cluster.assert_clean()


def test_a_draining_decode_worker_takes_nothing_new_and_moves_what_is_left_at_its_deadline(
    cluster: SeparateCluster, record_property: Any
) -> None:
    prompts = [prompt_of(50, salt) for salt in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = list(pool.map(lambda prompt: ask(cluster.url, prompt, NUM_TOKENS), prompts))
        answers = [pool.submit(ask, cluster.url, prompt, NUM_TOKENS) for prompt in prompts]
        busy = wait_until(lambda: next((now for now in [decoding(cluster)] if sum(now.values()) == 4), None), 10, "all are decoded", 0.01)
        name = max(busy, key=lambda name: busy[name])
        httpx.post(f"{cluster.named(name)['address']}/control/drain", json={"deadline_s": DRAIN_AT_ONCE_S}).raise_for_status()
        asked_at = time.monotonic()
        wait_until(lambda: not is_used(cluster, name), 5, "the router knows", 0.01)
        for salt in range(10, 14):
            ask(cluster.url, prompt_of(20, salt), 4)
        new_on = [decode_workers(request) for request in newest_requests(cluster, 4)]
        ended_well(cluster, name, DRAIN_DEADLINE_S - 5)
        exit_s = time.monotonic() - asked_at
        cluster.start_process(name)
        assert [answer.result(120) for answer in answers] == expected
    record_property("figures", {"exit_s": exit_s, "new_on": new_on})
    assert not any(name in workers for workers in new_on)
    assert cluster.metric(cluster.url, "pd_serve_moves_total", reason="draining") > 0
    cluster.wait_whole()
    cluster.assert_clean()


def test_a_prefill_worker_that_is_stopped_mid_prompt_finishes_it(cluster: SeparateCluster, record_property: Any) -> None:
    prompt = prompt_of(3000, 77)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, cluster.url, prompt, 8)
        busy = wait_until(lambda: [w["id"] for w in cluster.workers() if 0 < w["prefill_queue_tokens"] < 2800], 10, "mid-prompt", 0.01)
        moves = cluster.metric(cluster.url, "pd_serve_moves_total")
        cluster.processes[busy[0]].terminate()
        drain_s = ended_well(cluster, busy[0], DRAIN_DEADLINE_S + 5)
        cluster.start_process(busy[0])
        text = answer.result(120)
    assert cluster.metric(cluster.url, "pd_serve_moves_total") == moves, "it was finished where it was begun"
    record_property("figures", {"drain_s": drain_s})
    cluster.wait_whole()
    assert ask(cluster.url, prompt, 8) == text
    cluster.assert_clean()


async def test_a_worker_changes_sides_and_back_under_load_and_nothing_is_lost(cluster: SeparateCluster, record_property: Any) -> None:
    took_ms: list[float] = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S) as client:
        questions = await prepare(client, 3, 8, (40, 80))
        clients = Clients(client, questions, Random(3), 4)
        clients.start()
        for name, role in (("decode-1", "prefill"), ("prefill-0", "decode"), ("decode-1", "decode"), ("prefill-0", "prefill")):
            before = clients.num_answers
            await asyncio.to_thread(wait_until, lambda before=before: clients.num_answers >= before + 4, 20, "answers go on", 0.01)
            reply = await client.post(f"/admin/workers/{name}/role", json={"role": role, "deadline_s": DRAIN_AT_ONCE_S})
            assert reply.status_code == 200, reply.text
            assert reply.json()["worker"]["status"]["role"] == role
            took_ms.append(1e3 * reply.json()["seconds"])
        await clients.stop()
    record_property("figures", {"took_ms": took_ms, "answers": clients.num_answers})
    assert not clients.failures, clients.failures[0]
    cluster.assert_clean()


def test_requests_of_a_router_that_died_end_on_the_workers_within_a_second(cluster: SeparateCluster, record_property: Any) -> None:
    addresses = [worker["address"] for worker in cluster.workers()]
    incarnations = {worker["incarnation"] for worker in cluster.workers()}
    expected = ask(cluster.url, prompt_of(50, 1), 20)
    clients = [LeavingClient(cluster.url, prompt_of(50, salt), 2000) for salt in range(3)]
    for client in clients:
        client.wait_for_tokens()
    clients.append(LeavingClient(cluster.url, prompt_of(3000, 99), 8))
    wait_until(lambda: any(worker["prefill_queue_tokens"] for worker in cluster.workers()), 10, "one is mid-prompt", 0.01)
    cluster.processes["router"].kill()
    killed_at = time.monotonic()
    wait_until(lambda: not any(num_held_at(address) for address in addresses), 1.0, "the workers hold nothing", 0.01)
    clean_s = time.monotonic() - killed_at
    for client in clients:
        client.leave()
    cluster.wait_exit("router")
    cluster.start_process("router")
    wait_until(lambda: is_listening(cluster), 20, "the router listens")
    listening_at = time.monotonic()
    cluster.wait_whole()
    record_property("figures", {"clean_s": clean_s, "whole_after_listening_s": time.monotonic() - listening_at})
    assert {worker["incarnation"] for worker in cluster.workers()} == incarnations
    assert ask(cluster.url, prompt_of(50, 1), 20) == expected


def is_used(cluster: SeparateCluster, name: str) -> bool:
    """Whether the router may send it anything; one that has ended is not there at all."""
    return any(worker["id"] == name and (worker["ready"] or not worker["draining"]) for worker in cluster.workers())


def newest_requests(cluster: SeparateCluster, count: int) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = httpx.get(f"{cluster.url}/internal/v1/requests", timeout=10).raise_for_status().json()["requests"]
    return requests[:count]


def decode_workers(request: dict[str, Any]) -> set[str]:
    return {attempt["decode"].partition("@")[0] for attempt in request["attempts"]}
