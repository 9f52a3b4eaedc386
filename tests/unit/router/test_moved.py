"""A stream that has moved: what is counted of it at its new worker, in the queue, and for its tenant. Virtual time, frames by hand."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from pd_serve.clock import VirtualClock
from pd_serve.config import BreakerConfig
from pd_serve.ids import AttemptId, PeerId
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.link import (
    Failed,
    FailureReason,
    FinishReason,
    Open,
    RefusalReason,
    Refused,
    Reserved,
    Role,
    RouterFrame,
    Step,
    TokenOutput,
)
from router.assignment import Assigner
from router.breaker import Breakers, BreakerState
from router.dispatcher import Dispatcher, DispatcherSettings
from router.generation import Generation
from router.lifecycle import LifecycleSettings
from router.linked_worker import LinkedWorker
from router.occupancy import OwnOccupancy
from router.policy.base import Leg, RoutingSettings
from router.policy.chooser import RouteChooser
from router.policy.least_tokens import LeastTokens
from router.prefixes import Prefixes
from router.throughput import Throughput
from tests.fakes import block_counts, load, peer_id, peer_info, sampling, welcome

A, B = peer_id("a"), peer_id("b")
PROMPT = (1,) * 1000


class Fleet:
    """Workers that both compute prompts and decode, and that say what the test says. Create within an event loop."""

    def __init__(self, **blocks: int) -> None:
        self.clock = VirtualClock(1.0)
        self.prefixes = Prefixes(self.clock.now)
        self.workers: tuple[LinkedWorker, ...] = ()
        self.breakers = Breakers(BreakerConfig(failures_in_a_row=1, open_s=1.0), Metrics(CollectorRegistry(), Side.ROUTER), (A, B))
        self.opened: list[tuple[PeerId, Open]] = []
        self.speeds = Throughput()
        for name, num_blocks in blocks.items():
            self.join(name, num_blocks)
        routing = RoutingSettings(0, 10**9, 64, short_prompt_tokens=1 << 20)
        chooser = RouteChooser(LeastTokens(Leg.PREFILL), LeastTokens(Leg.DECODE), routing)
        self.assigner = Assigner(self, chooser, self.speeds, self.clock.now)  # type: ignore[arg-type]
        settings = DispatcherSettings(LifecycleSettings(60.0, 60.0, 3), routing, 60.0, 600.0, 100, True)
        metrics = Metrics(CollectorRegistry(), Side.ROUTER)
        self.router = Dispatcher(self, self.assigner, settings, metrics, self.clock, OwnOccupancy())  # type: ignore[arg-type]

    def join(self, name: str, num_blocks: int = 1 << 16) -> None:
        info = welcome(peer_info(peer_id(name), Role.BOTH), max_model_len=1 << 20)
        worker = LinkedWorker(peer_id(name), "http://x", None, info, load(Role.BOTH, block_counts(num_blocks)), 0.0)  # type: ignore[arg-type]
        self.workers += (worker,)

    def is_joining(self, worker: LinkedWorker) -> bool:
        return False

    def send(self, peer: PeerId, frame: RouterFrame) -> bool:
        if isinstance(frame, Open):
            self.opened.append((peer, frame))
        return True

    def ask(self, prompt: tuple[int, ...] = PROMPT) -> Generation:
        return self.router.submit(prompt, (sampling(1000),), lambda: None)[0]

    def hears(self, peer: PeerId, frame: Step | Reserved | Refused | Failed, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.router._frame_arrived(peer, frame)

    def token(self, peer: PeerId, generation: Generation, after_s: float = 0.0, finish: FinishReason | None = None) -> None:
        self.hears(peer, Step((TokenOutput(attempt_of(generation), 5, finish),)), after_s)

    def fails(self, peer: PeerId, generation: Generation, reason: FailureReason = FailureReason.ENGINE) -> None:
        self.hears(peer, Failed(attempt_of(generation), reason, "x"))

    def lose(self, peer: PeerId) -> None:
        self.workers = tuple(worker for worker in self.workers if worker.peer != peer)
        self.router._worker_lost(peer)
        self.router._pump()


def attempt_of(generation: Generation) -> AttemptId:
    assert generation.attempt_id is not None
    return generation.attempt_id


async def test_its_new_worker_has_computed_the_prompt_when_it_speaks_there() -> None:
    fleet = Fleet(a=1 << 16)
    moved = fleet.ask()
    fleet.hears(A, Reserved(attempt_of(moved), None, 0))
    fleet.token(A, moved, 1.0)
    for _ in range(99):
        fleet.token(A, moved, 0.01)
    fleet.join("b")
    fleet.fails(A, moved)
    assert fleet.opened[-1][0] == B
    fleet.hears(B, Reserved(attempt_of(moved), None, 0))
    fleet.token(B, moved, 1.0)
    view = next(view for view in fleet.assigner.views() if view.peer == B)
    assert view.short_backlog_tokens == 0
    assert fleet.speeds.is_idle()
    for _ in range(10):
        fleet.token(B, moved, 5.0)
    assert fleet.speeds.tokens_per_s(B) == pytest.approx(1100, rel=0.05), "prompt and what it had generated, in a second"
    fleet.token(B, moved, finish=FinishReason.STOP)
    assert fleet.router.is_empty()


async def test_its_first_token_there_ends_the_probe() -> None:
    fleet = Fleet(a=1 << 16)
    broke = fleet.ask()
    fleet.fails(A, broke)
    fleet.router.cancel(broke)
    fleet.join("b")
    moved = fleet.ask()
    fleet.token(B, moved, 2.0)
    fleet.fails(B, moved)
    assert fleet.opened[-1][0] == A
    assert fleet.breakers.states(A, fleet.clock.now())[0][1] is BreakerState.HALF_OPEN
    fleet.token(A, moved)
    assert fleet.breakers.states(A, fleet.clock.now())[0][1] is BreakerState.CLOSED
    fleet.router.cancel(moved)
    assert fleet.router.is_empty()


async def test_preemption_tells_of_room_at_the_worker_that_preempted_only() -> None:
    fleet = Fleet(a=1 << 16)
    moved = fleet.ask()
    fleet.token(A, moved)
    fleet.join("b")
    fleet.fails(A, moved)
    fleet.token(B, moved)
    fleet.fails(B, moved, FailureReason.PREEMPTED)
    free = {view.peer: view.num_free_tokens for view in fleet.assigner.views()}
    assert free[B] == 0
    assert free[A] > 0
    fleet.router.cancel(moved)


async def test_a_worker_that_is_gone_leaves_nothing_in_the_book() -> None:
    fleet = Fleet(a=1 << 16)
    moved = fleet.ask()
    fleet.token(A, moved)
    fleet.join("b")
    fleet.lose(A)
    fleet.token(B, moved)
    fleet.fails(B, moved, FailureReason.PREEMPTED)
    fleet.assigner.book.prefilled(1, A)
    fleet.assigner.book.refused(A)
    fleet.assigner.book.told(1, A, 1.0)
    assert set(fleet.assigner.book._workers) == {B}
    fleet.router.cancel(moved)


async def test_refused_for_room_it_is_still_before_those_that_never_began() -> None:
    fleet = Fleet(a=1 << 16)
    moved = fleet.ask()
    fleet.token(A, moved)
    fleet.fails(A, moved)
    fleet.hears(A, Refused(attempt_of(moved), RefusalReason.NO_CAPACITY, ""))
    assert moved.is_queued
    assert moved.is_returned
    fleet.router.cancel(moved)


async def test_one_that_no_worker_here_can_hold_is_passed_over_until_one_comes() -> None:
    fleet = Fleet(a=128)
    moved = fleet.ask((1,) * 1500)
    fleet.token(A, moved)
    fleet.join("b", 64)
    fleet.lose(A)
    assert moved.error is None
    assert moved.attempt_id is None
    short = fleet.ask((1, 2, 3))
    assert fleet.opened[-1][0] == B
    other = fleet.ask((1, 2, 3, 4))
    assert other.attempt_id is not None, "it holds up nobody"
    fleet.join("c", 128)
    fleet.router._pump()
    assert fleet.opened[-1][0] == peer_id("c")
    assert moved.attempt_id is not None
    for generation in (moved, short, other):
        fleet.router.cancel(generation)
    assert fleet.router.is_empty()


async def test_one_that_is_passed_over_can_be_cancelled() -> None:
    fleet = Fleet(a=128)
    moved = fleet.ask((1,) * 1500)
    fleet.token(A, moved)
    fleet.join("b", 64)
    fleet.lose(A)
    fleet.router.cancel(moved)
    assert not fleet.router._queue.num_passed_over
    assert fleet.router.is_empty()
