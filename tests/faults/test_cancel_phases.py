"""The client goes away in each phase of its request, and writers fall silent: both legs end, and every block comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster import Cluster, running, wait_until
from tests.faults.clients import LeavingClient, ask
from tests.pids import is_running, send
from tests.unit.engine.model_folders import write_config

CHUNK = 128
LENGTH = 2048
OUTPUT = 40
MODEL = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
"""Random weights: a prompt takes a second or two, a token a few milliseconds."""
HARD_FENCE_AFTER_S = 3.0
CLEAN_WITHIN_S = 2.0
SHORT_PROMPT = list(range(300, 310))
SETTINGS = {
    "model.load_format": "random",
    "model.name": "demo",
    "kv.memory_bytes": str(128 * 1024 * 1024),
    "engine.max_batch_tokens": str(CHUNK),
    "transport.hard_fence_after_s": str(HARD_FENCE_AFTER_S),
    "worker.quarantine_retry_s": "0.5",
    "worker.load_interval_s": "0.03",
    "router.worker_timeout_s": "6",
}
_salts = count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cancel")
    model = write_config(folder / "model", **MODEL)
    with running(folder, model=str(model), restart=True, settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[int, str]:
    """Of undisturbed requests, by the first token of their prompt; asked before anything goes wrong."""
    return {first: ask(cluster.url, list(range(first, first + 100)), 20) for first in (10, 150, 350)}


@pytest.fixture(autouse=True)
def _answers_stay_the_same(cluster: Cluster, answers: dict[int, str]) -> Iterator[None]:
    """Every test begins and ends with nothing held, and what was answered before is answered again."""
    yield
    wait_until(lambda: is_whole(cluster), 60, "both workers are ready and joined")
    assert {first: ask(cluster.url, list(range(first, first + 100)), 20) for first in answers} == answers
    cluster.assert_clean()


def fresh_prompt() -> list[int]:
    """A long one that no cache knows."""
    salt = next(_salts)
    return [(salt * 7919 + index * 104729) % 500 for index in range(LENGTH)]


def is_whole(cluster: Cluster) -> bool:
    workers = cluster.workers()
    names = {f"{worker['id']}@{worker['incarnation']:016x}" for worker in workers}
    joined = [{peer["peer"] for peer in worker["peers"] if peer["joined"]} for worker in workers]
    return len(workers) == 2 and all(worker["ready"] for worker in workers) and all(len(names & peers) == 1 for peers in joined)


def prompt_tokens_left(cluster: Cluster) -> int:
    left: int = cluster.worker("prefill")["prefill_queue_tokens"]
    return left


def until_mid_prefill(cluster: Cluster) -> int:
    """Wait for some chunks of a long prompt to be computed, and others not; the tokens that are left."""
    return int(
        wait_until(lambda: 0 < prompt_tokens_left(cluster) <= LENGTH - 2 * CHUNK and prompt_tokens_left(cluster), 20, "mid-prefill", 0.02)
    )


def num_quarantined(cluster: Cluster) -> int:
    return int(cluster.worker("decode")["blocks"]["quarantined"])


def computed_tokens(cluster: Cluster) -> float:
    """Of an idle worker: a busy one's counters are up to half a second old, one that becomes idle tells at once, if after its answer."""
    cluster.assert_clean()
    return cluster.settled_metric(cluster.worker("prefill")["address"], "pd_serve_computed_tokens_total", phase="prefill")


def seconds_until_clean(cluster: Cluster, within_s: float = CLEAN_WITHIN_S) -> float:
    began_at = time.monotonic()
    wait_until(lambda: cluster.num_held() == 0, within_s, "every table is empty", 0.02)
    return time.monotonic() - began_at


def seconds_of_a_short_answer(cluster: Cluster) -> float:
    began_at = time.monotonic()
    ask(cluster.url, SHORT_PROMPT, 1)
    return time.monotonic() - began_at


def test_a_client_that_leaves_mid_prefill_costs_no_more_than_a_chunk(cluster: Cluster, record_property: Any) -> None:
    idle_s = seconds_of_a_short_answer(cluster)
    before = computed_tokens(cluster)
    client = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    left = until_mid_prefill(cluster)
    client.leave()
    short_s = seconds_of_a_short_answer(cluster)
    clean_s = seconds_until_clean(cluster)
    computed = computed_tokens(cluster) - before
    record_property("figures", {"idle_short_s": idle_s, "short_s": short_s, "clean_s": clean_s, "computed": computed})
    # Two chunks may have begun since `left` was reported, and one runs when the cancel arrives: the short prompt waits for no more.
    assert computed - len(SHORT_PROMPT) <= LENGTH - left + 3 * CHUNK


def test_a_client_that_leaves_the_queue_was_never_computed(cluster: Cluster, record_property: Any) -> None:
    before = computed_tokens(cluster)
    first = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    until_mid_prefill(cluster)
    second = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    wait_until(lambda: cluster.status()["queued_requests"] == 1, 5, "the second one waits", 0.01)
    second.leave()
    began_at = time.monotonic()
    wait_until(lambda: cluster.status()["open_requests"] == 1, CLEAN_WITHIN_S, "the second one is forgotten", 0.01)
    record_property("figures", {"forgotten_s": time.monotonic() - began_at})
    first.wait_for_tokens()
    assert cluster.status()["queued_requests"] == 0
    first.leave()
    seconds_until_clean(cluster)
    assert computed_tokens(cluster) - before == LENGTH


def test_a_client_that_leaves_between_hand_over_and_first_decode_step(cluster: Cluster, record_property: Any) -> None:
    decode_pid = cluster.worker("decode")["rank_pids"][0]
    client = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    until_mid_prefill(cluster)
    # Before the last chunk: what is pushed needs nobody there, and the record waits for decode.
    wait_until(lambda: 0 < prompt_tokens_left(cluster) <= 4 * CHUNK, 20, "the last chunks", 0.01)
    os.kill(decode_pid, signal.SIGSTOP)
    try:
        wait_until(lambda: cluster.worker("prefill")["running"] == 0, 10, "prefill has handed everything over", 0.02)
        assert cluster.worker("decode")["leases"] == 1
        client.leave()
        wait_until(lambda: cluster.status()["open_requests"] == 0, CLEAN_WITHIN_S, "the router has cancelled", 0.02)
    finally:
        os.kill(decode_pid, signal.SIGCONT)
    # Of a process that has to wake up first.
    record_property("figures", {"clean_s": seconds_until_clean(cluster, 5.0)})


@pytest.mark.parametrize("num_tokens", [1, 10])
def test_a_client_that_leaves_after_the_first_tokens(cluster: Cluster, record_property: Any, num_tokens: int) -> None:
    client = LeavingClient(cluster.url, fresh_prompt()[:200], 800)
    client.wait_for_tokens(num_tokens)
    client.leave()
    record_property("figures", {"clean_s": seconds_until_clean(cluster)})


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", [150, 1000])
def test_many_clients_that_come_and_go_leave_nothing_behind(cluster: Cluster, record_property: Any, num_clients: int) -> None:
    processes = [psutil.Process(pid) for worker in cluster.workers() for pid in (worker["pid"], *worker["rank_pids"])]

    def storm(num_clients: int) -> None:
        for index in range(num_clients):
            client = LeavingClient(cluster.url, fresh_prompt()[: 1 + index * 37 % 300], OUTPUT)
            if index % 4 == 0:
                client.wait_for_tokens()
            client.leave()

    storm(40)
    cluster.assert_clean()
    before = [(process.num_fds(), own_memory(process) >> 20) for process in processes]
    storm(num_clients)
    clean_s = seconds_until_clean(cluster)
    after = [(process.num_fds(), own_memory(process) >> 20) for process in processes]
    record_property("figures", {"clean_s": clean_s, "fds_and_mib_before": before, "after": after})
    for (fds_before, _), (fds_after, _) in zip(before, after, strict=True):
        assert fds_after <= fds_before + 2


def test_a_stopped_writer_that_goes_on_lets_go_by_itself(cluster: Cluster, record_property: Any) -> None:
    writer = cluster.worker("prefill")
    client = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    until_mid_prefill(cluster)
    os.kill(writer["rank_pids"][0], signal.SIGSTOP)
    try:
        client.leave()
        wait_until(lambda: num_quarantined(cluster) > 0, HARD_FENCE_AFTER_S, "the blocks are in quarantine", 0.01)
        assert cluster.worker("decode")["running"] == 0
    finally:
        os.kill(writer["rank_pids"][0], signal.SIGCONT)
    record_property("figures", {"clean_s": seconds_until_clean(cluster)})
    assert cluster.worker("prefill")["incarnation"] == writer["incarnation"]


def test_blocks_of_a_silent_writer_come_back_by_the_hard_fence(cluster: Cluster, record_property: Any) -> None:
    writer, decode = cluster.worker("prefill"), cluster.worker("decode")
    assert next(peer for peer in decode["peers"] if peer["joined"])["one_sided"]
    client = LeavingClient(cluster.url, fresh_prompt(), OUTPUT)
    until_mid_prefill(cluster)
    os.kill(writer["rank_pids"][0], signal.SIGSTOP)
    client.leave()
    left_at = time.monotonic()
    wait_until(lambda: num_quarantined(cluster) == LENGTH // 16, HARD_FENCE_AFTER_S, "the blocks are in quarantine", 0.01)
    wait_until(lambda: num_quarantined(cluster) == 0, HARD_FENCE_AFTER_S + 5, "they come back", 0.01)
    quarantine_s = time.monotonic() - left_at
    assert quarantine_s >= HARD_FENCE_AFTER_S - 0.1, "given back while the writer could still write"
    wait_until(lambda: not is_running(writer["rank_pids"][0]), 20, "the writer has been killed")
    wait_until(lambda: is_whole(cluster), 60, "the writer was started again and has joined")
    record_property("figures", {"quarantine_s": quarantine_s, "whole_again_s": time.monotonic() - left_at})
    assert cluster.worker("prefill")["incarnation"] != writer["incarnation"]
    assert cluster.metric(decode["address"], "pd_serve_hard_fences_total") == 1


def test_a_client_that_stays_is_answered_though_its_writer_fell_silent(cluster: Cluster, record_property: Any) -> None:
    writer, prompt = cluster.worker("prefill"), fresh_prompt()
    began_at = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, cluster.url, prompt, 8)
        until_mid_prefill(cluster)
        os.kill(writer["rank_pids"][0], signal.SIGSTOP)
        try:
            text = answer.result(60)
        finally:
            send(writer["rank_pids"], signal.SIGCONT)
    record_property("figures", {"answered_s": time.monotonic() - began_at})
    wait_until(lambda: is_whole(cluster), 60, "both workers are back")
    assert ask(cluster.url, prompt, 8) == text


def test_frozen_engines_read_unhealthy_and_are_used_again_when_they_go_on(cluster: Cluster, record_property: Any) -> None:
    workers = cluster.workers()
    ranks = [worker["rank_pids"][0] for worker in workers]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    stopped_at = time.monotonic()
    try:
        wait_until(lambda: {health(worker) for worker in workers} == {503}, 10, "both read unhealthy", 0.1)
        noticed_s = time.monotonic() - stopped_at
        assert {httpx.get(f"{worker['address']}/ready").status_code for worker in workers} == {503}
        wait_until(lambda: not any(worker["ready"] for worker in cluster.workers()), 10, "the router does not use them")
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
    went_on_at = time.monotonic()
    wait_until(lambda: {health(worker) for worker in workers} == {200}, 10, "they are healthy again", 0.05)
    healthy_s = time.monotonic() - went_on_at
    wait_until(lambda: is_whole(cluster), 30, "they are used again")
    record_property("figures", {"noticed_s": noticed_s, "healthy_s": healthy_s, "used_s": time.monotonic() - went_on_at})
    assert [worker["incarnation"] for worker in cluster.workers()] == [worker["incarnation"] for worker in workers]


def own_memory(process: psutil.Process) -> int:
    """Resident bytes but those of shared memory: pages of the KV pool come in as its blocks are first used."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def health(worker: dict[str, Any]) -> int:
    return httpx.get(f"{worker['address']}/health", timeout=60).status_code
