"""Two ranks of one worker on threads: rank 0's control loop and a follower, loopback transports and fake runners around them."""

from __future__ import annotations

import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.engine.batch import Batch, StepResult
from pd_serve.ids import AttemptId, Incarnation, PeerId, WorkerId
from pd_serve.protocol.link import Failed, FailureReason, Fatal, PeerInfo, RankReady, Role, Stop, Welcome
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.cluster import wait_until
from tests.fake_engine import VOCAB_SIZE, FakeRunner, expected_tokens, small_layout
from tests.patience import PATIENCE_S
from tests.rank_driver import RankDriver, open_local, tokens_of
from tests.rank_threads import STOP_S
from tests.whole_rank import make_machine
from workers import control_loop
from workers.control_loop import ControlLoop, RankParts
from workers.engine_thread import EngineThread, LayerHook
from workers.front_socket import FrontSocket
from workers.inbox import Inbox
from workers.rank_follower import Follower
from workers.rank_frames import FollowerReady, FollowerSocket, LeaderSocket
from workers.rank_group import RankGroup, rank_peer
from workers.rank_spec import RankSpec
from workers.rank_start import OpenRank, RankMessage
from workers.transport_commands import AllocatePool
from workers.transport_thread import TransportThread

PROMPT = tuple(range(10, 29))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PEER = PeerId(WorkerId("w"), Incarnation(secrets.randbits(32)))


class Runner(FakeRunner):
    """Keeps the ids of its steps, and can be stopped before one."""

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(small_layout(), buffer)
        self.steps: list[int] = []
        self.go = threading.Event()
        self.go.set()

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None) -> StepResult:
        assert self.go.wait(PATIENCE_S)
        self.steps.append(batch.step_id)
        return super().execute(batch, on_layer)


@dataclass
class Opened:
    rank: OpenRank
    inbox: Inbox[RankMessage]
    runner: Runner


def open_threads(fabric: LoopbackFabric, number: int) -> Opened:
    inbox: Inbox[RankMessage] = Inbox()
    engine = EngineThread(inbox.put, MonotonicClock())
    settings = TransportSettings(self_id=rank_peer(PEER, number), secret=b"s", host="127.0.0.1", host_id="here", probe_nbytes=4096)
    transport = TransportThread(lambda s, sink: LoopbackTransport(s, sink, fabric), settings, inbox.put)
    ready = transport.start(AllocatePool(small_layout().pool_nbytes), PATIENCE_S)
    assert ready.region.buffer is not None
    runner = Runner(ready.region.buffer)
    engine.start()
    engine.serve(runner, LayerHook(transport.submit))
    return Opened(OpenRank(None, ready, engine, transport), inbox, runner)  # type: ignore[arg-type]


@dataclass
class Pair:
    driver: RankDriver
    leader: Opened
    follower: Opened
    threads: dict[str, threading.Thread]
    codes: dict[str, int]
    leader_socket: LeaderSocket

    def ended(self, name: str) -> int:
        self.threads[name].join(10)
        return self.codes[name]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    fabric = LoopbackFabric()
    first, second = open_threads(fabric, 0), open_threads(fabric, 1)
    near, far = socket.socketpair()
    mine, theirs = socket.socketpair()
    down, up = FollowerSocket(mine, 1), LeaderSocket(theirs)
    config = Config.model_validate({"engine": {"tp": 2}, "worker": {"report_interval_s": 0.05}})
    spec = RankSpec(worker_id="w", incarnation=PEER.incarnation, role=Role.BOTH, socket_path="", config=config, rank=1)
    monkeypatch.setattr("workers.rank_follower.open_rank", lambda spec, post: second.rank)
    follower = Follower(spec, up)
    follower._inbox = second.inbox
    info = PeerInfo(PEER, Role.BOTH, 1, "fake", small_layout(), "loopback", (first.rank.ready.metadata, second.rank.ready.metadata), 2)
    parts = RankParts(FrontSocket(far), first.inbox, first.rank.engine, first.rank.transport, RankGroup(2, 2), (down,))
    loop = ControlLoop(make_machine(info, small_layout(), 16), parts, 0.05, MonotonicClock())
    parts.front.send(RankReady(Welcome(info, "fake", 128, VOCAB_SIZE, (), 0, ())))
    codes: dict[str, int] = {}

    def run(name: str, target: Callable[[], int]) -> None:
        codes[name] = target()
        if name == "leader":
            down.close()

    # FollowerReady is waited for by the rank's main function; here it is taken first.
    threads = {"follower": threading.Thread(target=run, args=("follower", follower.run))}
    threads["follower"].start()
    frames: list[object] = []
    while not frames:
        assert select.select([down], [], [], PATIENCE_S)[0]
        frames = list(down.receive())
    assert isinstance(frames[0], FollowerReady)
    threads["leader"] = threading.Thread(target=run, args=("leader", loop.run))
    threads["leader"].start()
    driver = RankDriver(near)
    driver.wait_ready()
    yield Pair(driver, first, second, threads, codes, up)
    for opened in (first, second):
        opened.runner.go.set()
    near.close()
    for thread in threads.values():
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    for opened in (first, second):
        assert opened.rank.engine.stop(PATIENCE_S)
        assert opened.rank.transport.stop(STOP_S)
        opened.inbox.close()
    for connection in (parts.front, down, up):
        connection.close()


def test_both_ranks_run_the_same_batches_and_a_step_ends_with_the_last(pair: Pair) -> None:
    open_local(pair.driver, 1, PROMPT, GREEDY)
    assert [token.token_id for token in tokens_of(pair.driver, AttemptId(1))] == expected_tokens(PROMPT, 6)
    assert pair.leader.runner.steps == pair.follower.runner.steps
    assert (pair.leader.runner.slots == pair.follower.runner.slots).all()
    num_steps = len(pair.leader.runner.steps)
    pair.follower.runner.go.clear()
    open_local(pair.driver, 2, PROMPT[:3], GREEDY)
    wait_until(lambda: len(pair.leader.runner.steps) > num_steps, PATIENCE_S, "rank 0 computes")
    pair.driver.timeout_s = 0.3
    with pytest.raises(TimeoutError):
        tokens_of(pair.driver, AttemptId(2))
    assert len(pair.leader.runner.steps) == len(pair.follower.runner.steps) + 1
    pair.driver.timeout_s = PATIENCE_S
    pair.follower.runner.go.set()
    assert [token.token_id for token in tokens_of(pair.driver, AttemptId(2))] == expected_tokens(PROMPT[:3], 6)


@pytest.mark.parametrize("failing", ["leader", "follower"])
def test_a_step_that_one_rank_fails_costs_its_attempts_and_no_more(pair: Pair, failing: str) -> None:
    {"leader": pair.leader, "follower": pair.follower}[failing].runner.fail_next = 1
    open_local(pair.driver, 1, PROMPT, GREEDY)
    failed = pair.driver.wait(Failed)
    assert (failed.attempt_id, failed.reason) == (1, FailureReason.ENGINE)
    assert f"rank {0 if failing == 'leader' else 1}: RuntimeError: planted" in failed.detail
    open_local(pair.driver, 2, PROMPT, GREEDY)
    assert [token.token_id for token in tokens_of(pair.driver, AttemptId(2))] == expected_tokens(PROMPT, 6)


def test_a_failed_step_that_another_rank_does_not_end_ends_the_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "FAILED_STEP_S", 0.2)
    pair.leader.runner.fail_next = 1
    pair.follower.runner.go.clear()
    open_local(pair.driver, 1, PROMPT, GREEDY)
    assert "has failed a step" in pair.driver.wait_rank(Fatal).message
    assert pair.ended("leader") == 1


def test_a_rank_that_says_nothing_ends_the_worker(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "FROZEN_RANK_S", 0.2)
    monkeypatch.setattr(pair.leader_socket, "send", lambda frame: None)
    assert "rank 1 has said nothing" in pair.driver.wait_rank(Fatal).message
    assert pair.ended("leader") == 1
    assert pair.ended("follower") == 0


def test_stop_reaches_the_other_rank(pair: Pair) -> None:
    pair.driver.send(Stop())
    assert (pair.ended("leader"), pair.ended("follower")) == (0, 0)


def test_the_end_of_either_is_the_end_of_the_other(pair: Pair) -> None:
    pair.leader_socket.close()
    assert "rank 1 has ended" in pair.driver.wait_rank(Fatal).message
    assert pair.ended("leader") == 1
