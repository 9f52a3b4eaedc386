"""Workers of several ranks: real processes, the ucx transport, a tiny random model. Below the fronts every pair of degrees gives the tokens
of one rank alone; above them the end of one rank is the end of its worker, and of nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Cancel, Closed, Fatal, FinishReason, Open, Report, Stop
from pd_serve.protocol.sampling import SamplingParams
from tests.cluster import Cluster, running, wait_until
from tests.fakes import write_tokenizer
from tests.rank_driver import join, open_local, open_pair, run_pair, tokens_of
from tests.unit.engine.model_folders import write_config
from tests.worker_of_ranks import WorkerOfRanks

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 300}
"""Of 4 ranks, two hold the same KV head."""
KV_NBYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Keys and values, 2 layers, 2 KV heads of 8, float32."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
FORMED = SamplingParams(max_tokens=30, temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "([a-f][0-9]){8}"))
"""Ends by itself: 16 bytes and the end."""

Workers = dict[str, WorkerOfRanks]


@contextmanager
def started(folder: Path, degrees: dict[str, int], **sections: dict[str, Any]) -> Iterator[Workers]:
    """Workers by name, all joined with each other."""
    model = write_config(write_tokenizer(folder / "model"), **SHAPE)
    sections = {"model": {"id": str(model), "load_format": "random", "dtype": "float32"}, **sections}
    workers = {name: WorkerOfRanks(folder, name, degree, **sections) for name, degree in degrees.items()}
    try:
        for worker in workers.values():
            worker.driver.wait_ready()
        join(*(worker.driver for worker in workers.values()))
        for worker in workers.values():
            worker.driver.timeout_s = 60.0
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    degrees = {"p1": 1, "p2": 2, "d1": 1, "d2": 2}
    with started(tmp_path_factory.mktemp("ranks"), degrees, transport={"verify": True}) as workers:
        yield workers


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 7919 + i * 104729) % 290 + 5 for i in range(length))


def check_pair(prefill: WorkerOfRanks, decode: WorkerOfRanks, alone: WorkerOfRanks, salt: int) -> None:
    """What the pair generates is what one rank alone does, and nothing is held afterwards."""
    for length, sampling in ((1, GREEDY), (17, SAMPLED), (100, GREEDY), (40, FORMED)):
        prompt, attempt = prompt_of(length, salt + length), secrets.randbits(40)
        pushed = run_pair(prefill.driver, decode.driver, attempt, prompt, sampling)
        open_local(alone.driver, attempt + 1, prompt, sampling)
        local = tokens_of(alone.driver, AttemptId(attempt + 1))
        assert [token.token_id for token in pushed] == [token.token_id for token in local]
        # The second time decode has most of the prompt, and prefill all of it.
        again = run_pair(prefill.driver, decode.driver, attempt + 2, prompt, sampling)
        assert [token.token_id for token in again] == [token.token_id for token in local]
    for worker in (prefill, decode):
        assert_idle(worker)


def assert_idle(worker: WorkerOfRanks) -> None:
    worker.driver.reports.clear()
    report = worker.driver.wait_rank(Report, lambda report: report.idle)
    assert report.load.blocks.total == report.load.blocks.free + report.load.blocks.cached


@pytest.mark.parametrize(("prefill", "decode"), [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2")])
def test_any_pair_of_degrees_gives_the_tokens_of_one_rank(workers: Workers, prefill: str, decode: str) -> None:
    check_pair(workers[prefill], workers[decode], workers["d1" if decode == "d2" else "p1"], salt=len(prefill) * 1000 + int(decode[1]))


def test_a_worker_of_two_ranks_computes_alone_what_one_rank_does(workers: Workers) -> None:
    prompt = prompt_of(70, salt=5)
    open_local(workers["d2"].driver, 901, prompt, GREEDY)
    open_local(workers["p1"].driver, 902, prompt, GREEDY)
    tokens = [tokens_of(workers[name].driver, AttemptId(attempt)) for name, attempt in (("d2", 901), ("p1", 902))]
    assert [token.token_id for token in tokens[0]] == [token.token_id for token in tokens[1]]


def test_an_answer_of_a_form_keeps_to_it_where_it_is_moved(workers: Workers) -> None:
    """To a worker that has not seen its form, of another number of ranks, with some of its tokens."""
    prompt = prompt_of(30, salt=6)
    sampling = msgspec.structs.replace(FORMED, grammar=Grammar(GrammarKind.REGEX, "([a-f]{2}[0-9] ){5}"))
    open_local(workers["p1"].driver, 903, prompt, sampling)
    tokens = tokens_of(workers["p1"].driver, AttemptId(903))
    ids = tuple(token.token_id for token in tokens)
    assert re.fullmatch("([a-f]{2}[0-9] ){5}", bytes(token_id - 4 for token_id in ids[:-1]).decode())
    assert tokens[-1].finish is FinishReason.STOP
    for attempt, count, name in ((904, 1, "d2"), (905, 7, "d1")):
        left = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - count)
        workers[name].driver.tell(Open(AttemptId(attempt), prompt + ids[:count], count, left, None, 30.0))
        moved = tokens_of(workers[name].driver, AttemptId(attempt))
        assert tuple(token.token_id for token in moved) == ids[count:]


def test_every_byte_is_sent_once_over_all_routes(workers: Workers) -> None:
    prefill, decode = workers["p2"].driver, workers["d1"].driver
    prefill.reports.clear()
    run_pair(prefill, decode, secrets.randbits(40), prompt_of(90, salt=77), GREEDY)
    total = 0.0
    while total < 90 * KV_NBYTES_PER_TOKEN:
        report = prefill.wait_rank(Report)
        total += sum(sample.value for sample in report.samples if sample.metric == "pd_serve_kv_transfer_bytes_total")
    assert total == 90 * KV_NBYTES_PER_TOKEN
    assert_idle(workers["p2"])


def test_cancelled_attempts_leave_nothing_on_any_rank(workers: Workers) -> None:
    prefill, decode = workers["p2"], workers["d2"]
    for index in range(6):
        attempt = AttemptId(secrets.randbits(40))
        open_pair(prefill.driver, decode.driver, attempt, prompt_of(200, salt=300 + index), GREEDY)
        for worker in (decode, prefill) if index % 2 else (prefill, decode):
            worker.driver.tell(Cancel(attempt))
            worker.driver.wait(Closed, lambda closed, attempt=attempt: closed.attempt_id == attempt)
    for worker in (prefill, decode):
        assert_idle(worker)
    check_pair(prefill, decode, workers["p1"], salt=9000)


def test_stop_ends_all_ranks_and_the_end_of_one_the_others(workers: Workers) -> None:
    """The last that uses these workers."""
    workers["p2"].driver.send(Stop())
    assert [process.wait(60) for process in workers["p2"].processes] == [0, 0]
    workers["d2"].processes[1].kill()
    assert "rank 1 has ended" in workers["d2"].driver.wait_rank(Fatal).message
    assert workers["d2"].processes[0].wait(60) == 1


@pytest.mark.slow
def test_every_pair_of_up_to_four_ranks_gives_the_tokens_of_one(tmp_path: Path) -> None:
    degrees = {f"{role}{degree}": degree for role in "pd" for degree in (1, 2, 4)}
    with started(tmp_path, degrees) as workers:
        for prefill in ("p1", "p2", "p4"):
            for decode in ("d1", "d2", "d4"):
                alone = workers["d1" if decode != "d1" else "p1"]
                check_pair(workers[prefill], workers[decode], alone, salt=int(prefill[1]) * 1000 + int(decode[1]))


# ---- a whole cluster


def _complete(cluster: Cluster, prompt: list[int], max_tokens: int) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=90)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def _kill_under_load(cluster: Cluster, role: str, prompts: list[list[int]], expected: list[str]) -> None:
    """Kill the second rank of the role's worker while all prompts are being answered; back to a whole cluster."""
    victim = cluster.worker(role)
    answers = [""] * len(prompts)

    def ask(index: int) -> None:
        answers[index] = _complete(cluster, prompts[index], 150)

    clients = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for client in clients:
        client.start()
    wait_until(lambda: cluster.worker("decode")["running"] > 0, 20.0, "requests run")
    os.kill(victim["rank_pids"][1], signal.SIGKILL)
    for client in clients:
        client.join()
    assert answers == expected

    def is_back() -> bool:
        workers = [worker for worker in cluster.workers() if worker["role"] == role]
        return bool(workers) and workers[0]["ready"] and not set(workers[0]["rank_pids"]) & set(victim["rank_pids"])

    wait_until(is_back, 60.0, "the worker has been started again")
    wait_until(lambda: all(peer["joined"] for peer in cluster.worker("prefill")["peers"]), 20.0, "it has joined")


def test_the_death_of_a_rank_restarts_its_worker_and_loses_no_request(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", **SHAPE)
    settings = {"model.load_format": "random", "model.name": "tiny", "kv.num_blocks": "128", "engine.threads": "1", "tp": "2"}
    with running(tmp_path / "logs", model=str(model), settings=settings, restart=True) as cluster:
        assert [len(worker["rank_pids"]) for worker in cluster.workers()] == [2, 2]
        prompts = [[(i * 7 + salt) % 250 + 5 for i in range(30 + salt)] for salt in range(4)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            expected = list(pool.map(lambda prompt: _complete(cluster, prompt, 150), prompts))
        _kill_under_load(cluster, "decode", prompts, expected)
        _kill_under_load(cluster, "prefill", prompts, expected)
        assert _complete(cluster, prompts[0], 150) == expected[0]
