"""Two real rank processes with the demo model and the ucx transport, driven over their sockets as their fronts would.

The proof of the whole below the fronts: what is prefilled in one process and decoded in the other equals what one process does alone.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_serve.config import Config
from pd_serve.cores import thread_env
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Drain, Fatal, FinishReason, GetTrace, Peers, PeerStatus, Report, Role, Stop
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.traces import Traces
from tests.rank_driver import RankDriver, join, open_local, run_pair, tokens_of
from tests.unit.engine.model_folders import write_config
from workers.rank_spec import RankSpec

START_S = 120.0
"""The demo model may have to be converted first."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, seed=1234, presence_penalty=0.4, ignore_eos=True, num_logprobs=2)


class RankUnderTest:
    """A rank process whose front is the test."""

    def __init__(self, folder: Path, name: str, role: Role, **sections: dict[str, Any]) -> None:
        path = folder / f"{name}.sock"
        values: dict[str, dict[str, Any]] = {
            "model": {"dtype": "float32"},
            "kv": {"num_blocks": 256},
            "engine": {"device": "cpu", "threads": 1, "max_batch_tokens": 64, "warm_up_s": 0},
            "worker": {"report_interval_s": 0.1},
            "observe": {"log_level": "warning"},
        }
        for section, changes in sections.items():
            values[section] = values.get(section, {}) | changes
        config = Config.model_validate(values)
        spec = RankSpec(worker_id=name, incarnation=secrets.randbits(62), role=role, socket_path=str(path), config=config)
        spec.write(folder / f"{name}.json")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(START_S)
            self.process = subprocess.Popen([sys.executable, "-m", "workers.rank", str(folder / f"{name}.json")], env=_env())
            self.connection, _ = listener.accept()
        self.driver = RankDriver(self.connection, START_S)

    def close(self) -> None:
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _env() -> dict[str, str]:
    return {**os.environ, **thread_env(1)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankUnderTest, RankUnderTest]]:
    folder = tmp_path_factory.mktemp("ranks")
    prefill = RankUnderTest(folder, "p", Role.PREFILL)
    decode = RankUnderTest(folder, "d", Role.DECODE)
    try:
        for rank in (prefill, decode):
            rank.driver.wait_ready()
            rank.driver.timeout_s = 60.0
        join(prefill.driver, decode.driver)
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def prompt_of(length: int, salt: int) -> tuple[int, ...]:
    return tuple((salt * 7919 + i * 104729) % 40_000 + 100 for i in range(length))


@pytest.mark.parametrize(("length", "sampling"), [(1, GREEDY), (15, SAMPLED), (16, GREEDY), (17, SAMPLED), (150, GREEDY), (150, SAMPLED)])
def test_pushed_attempt_equals_a_local_one(ranks: tuple[RankUnderTest, RankUnderTest], length: int, sampling: SamplingParams) -> None:
    prefill, decode = (rank.driver for rank in ranks)
    prompt = prompt_of(length, salt=length)
    attempt = secrets.randbits(40)
    pushed = run_pair(prefill, decode, attempt, prompt, sampling)
    # On the prefill worker, which has not seen the decoded tokens: an independent computation of the same attempt.
    open_local(prefill, attempt + 1, prompt, sampling)
    local = tokens_of(prefill, AttemptId(attempt + 1))
    assert [token.token_id for token in pushed] == [token.token_id for token in local]
    assert len(pushed) == sampling.max_tokens
    assert pushed[-1].finish is FinishReason.LENGTH


def test_both_are_empty_afterwards_and_the_transfer_was_measured(ranks: tuple[RankUnderTest, RankUnderTest]) -> None:
    prefill, decode = (rank.driver for rank in ranks)
    run_pair(prefill, decode, secrets.randbits(40), prompt_of(100, salt=99), GREEDY)
    for driver in (prefill, decode):
        driver.reports.clear()
        blocks = driver.wait_rank(Report, lambda report: report.idle).load.blocks
        assert blocks.total == blocks.free + blocks.cached
    prefill.send(GetTrace(1))
    (trace,) = prefill.wait_rank(Traces).traces
    assert trace.num_tokens == 100
    assert trace.lane == "posix"
    assert sum(layer.nbytes for layer in trace.layers) == 100 * 30 * 2 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("transport", "joined", "said"),
    [
        ({"lanes": "tcp", "binding": "libucp"}, True, "tcp"),
        ({"lanes": "shm", "min_bandwidth": 1e15}, False, "the least allowed is 1e+15"),
        ({"lanes": "shm", "binding": "ucxpy"}, None, "ucx-py"),
    ],
    ids=["lane", "floor", "binding"],
)
def test_transport_settings_reach_the_transport(tmp_path: Path, transport: dict[str, Any], joined: bool | None, said: str) -> None:
    model = write_config(tmp_path / "model")
    sections = {"model": {"id": str(model), "load_format": "random"}, "transport": transport}
    ranks = [RankUnderTest(tmp_path, name, Role.BOTH, **sections) for name in ("p" if joined is None else "pd")]
    try:
        if joined is None:
            assert said in _fatal_or_skip(ranks[0])
            return
        infos = tuple(rank.driver.wait_ready() for rank in ranks)
        for rank in ranks:
            rank.driver.tell(Peers(infos))
        status = ranks[0].driver.wait(PeerStatus, lambda status: any(state.joined or state.detail for state in status.states))
        (state,) = status.states
        assert state.joined is joined
        assert said in (state.lane if joined else state.detail)
        assert not state.one_sided
    finally:
        for rank in ranks:
            rank.close()


def _fatal_or_skip(rank: RankUnderTest) -> str:
    """What a rank says of a binding that is not installed here."""
    if importlib.util.find_spec("ucp") is not None:
        pytest.skip("ucx-py is installed: nothing to refuse")
    return rank.driver.wait_rank(Fatal).message


def test_ctrl_c_does_not_end_a_rank_but_drain_and_stop_do(tmp_path: Path) -> None:
    rank = small_rank(tmp_path)
    try:
        rank.driver.wait_ready()
        rank.process.send_signal(signal.SIGINT)
        rank.driver.send(Drain(5.0))
        rank.driver.wait_rank(Report, lambda report: report.idle and report.load.draining)
        rank.driver.send(Stop())
        assert rank.process.wait(60) == 0
    finally:
        rank.close()


def small_rank(folder: Path) -> RankUnderTest:
    """Of random weights: it ends like one of the demo model."""
    return RankUnderTest(folder, "x", Role.BOTH, model={"id": str(write_config(folder / "model")), "load_format": "random"})


def test_rank_ends_when_its_front_does(tmp_path: Path) -> None:
    rank = small_rank(tmp_path)
    try:
        rank.driver.wait_ready()
        rank.connection.close()
        assert rank.process.wait(60) == 1
    finally:
        rank.close()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"id": "/nonexistent/model"}}, "/nonexistent/model"),
        ({"transport": {"name": "carrier-pigeon"}}, "carrier-pigeon"),
        ({"model": {"max_len": 1_000_000}}, "max_len"),
    ],
    ids=["model", "transport", "length"],
)
def test_rank_that_cannot_start_says_why_in_one_line(tmp_path: Path, sections: dict[str, dict[str, Any]], said: str) -> None:
    rank = RankUnderTest(tmp_path, "x", Role.BOTH, **sections)
    try:
        message = rank.driver.wait_rank(Fatal).message
        assert said in message
        assert "\n" not in message
        assert rank.process.wait(60) == 1
    finally:
        rank.close()
