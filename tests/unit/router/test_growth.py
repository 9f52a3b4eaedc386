"""Work per request, counted in calls: the same whether few or thousands of requests wait or run. No clock is asked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from prometheus_client import CollectorRegistry

from pd_serve.clock import VirtualClock
from pd_serve.config import BreakerConfig
from pd_serve.ids import PeerId
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.link import FinishReason, Open, Reserved, Role, RouterFrame, Step, TokenOutput
from router import load as load_book
from router.assignment import Assigner
from router.breaker import Breakers
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

FEW, MANY = 200, 800
PEER = peer_id("both-0")


class Pool:
    """One worker whose frames are kept; room for as many sequences as the settings say."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.prefixes = Prefixes(lambda: 0.0)
        self.breakers = Breakers(BreakerConfig(), Metrics(CollectorRegistry(), Side.ROUTER), {})
        info = welcome(peer_info(PEER, Role.BOTH))
        self.workers = (LinkedWorker(PEER, "http://x", None, info, load(Role.BOTH, block_counts(1 << 20)), 0.0),)  # type: ignore[arg-type]

    def is_joining(self, worker: LinkedWorker) -> bool:
        return False

    def send(self, peer: PeerId, frame: RouterFrame) -> bool:
        if isinstance(frame, Open):
            self.opened.append(frame.attempt_id)
        return True


def dispatcher(pool: Pool, max_sequences: int) -> Dispatcher:
    settings = DispatcherSettings(
        lifecycle=LifecycleSettings(60.0, 60.0, 3),
        routing=RoutingSettings(0, 10**9, max_sequences),
        queue_timeout_s=60.0,
        request_timeout_s=600.0,
        max_queued=10**6,
        share_prefix=True,
    )
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    chooser = RouteChooser(LeastTokens(Leg.PREFILL), LeastTokens(Leg.DECODE), settings.routing)
    clock = VirtualClock()
    return Dispatcher(pool, Assigner(pool, chooser, Throughput(), clock.now), settings, metrics, clock, OwnOccupancy())  # type: ignore[arg-type]


def calls_of(work: Callable[[], object]) -> int:
    """Python functions called, generators' turns included."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def submit(router: Dispatcher, number: int, max_tokens: int = 4) -> list[Generation]:
    return [router.submit((1, 2, 3), (sampling(max_tokens),), lambda: None)[0] for _ in range(number)]


def calls_per_request(number: int, max_sequences: int) -> dict[str, float]:
    """Of every stage in the life of so many requests at once."""
    pool = Pool()
    router = dispatcher(pool, max_sequences)
    found = {"submit": calls_of(lambda: submit(router, number)) / number}
    told = pool.opened[:50]
    found["reserve"] = calls_of(lambda: [router._frame_arrived(PEER, Reserved(attempt, None, 0)) for attempt in told]) / 50  # type: ignore[arg-type]
    step = Step(tuple(TokenOutput(attempt, 5) for attempt in told))  # type: ignore[arg-type]
    found["token"] = calls_of(lambda: router._frame_arrived(PEER, step)) / 50
    found["report"] = calls_of(lambda: router._frame_arrived(PEER, load(Role.BOTH, block_counts(1 << 20)))) / 50
    last = Step(tuple(TokenOutput(attempt, 5, FinishReason.LENGTH) for attempt in told))  # type: ignore[arg-type]
    found["finish"] = calls_of(lambda: router._frame_arrived(PEER, last)) / 50
    rest = list(router._open.values())
    found["cancel"] = calls_of(lambda: [router.cancel(generation) for generation in reversed(rest)]) / len(rest)
    assert router.is_empty()
    return found


def grown(max_sequences: int) -> dict[str, tuple[float, float]]:
    """Stages that take a fifth more calls with MANY than with FEW."""
    few, many = calls_per_request(FEW, max_sequences), calls_per_request(MANY, max_sequences)
    return {stage: (few[stage], many[stage]) for stage in few if many[stage] > 1.2 * few[stage] + 0.5}


@pytest.mark.parametrize("max_sequences", [50, 10**6], ids=["most wait", "all run"])
async def test_a_request_takes_as_many_calls_among_thousands(max_sequences: int) -> None:
    assert grown(max_sequences) == {}
    await asyncio.sleep(0)


async def test_sums_that_are_made_anew_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_anew(worker: load_book._Worker, report: object) -> int:
        return sum(charge.num_tokens for charge in worker.decode._charges.values())

    monkeypatch.setattr(load_book, "_decode_tokens", made_anew)
    assert "submit" in grown(10**6)
    await asyncio.sleep(0)
