"""A circuit breaker for each leg of each worker: one that keeps failing is used only when there is nothing else.

    CLOSED --- `failures_in_a_row`, or a share of `failure_share` of the last `window_s` ---> OPEN
    OPEN ----- after `open_s`, twice as long after every probe that failed ----------------> HALF_OPEN
    HALF_OPEN: one request at a time is its probe; success -> CLOSED, failure -> OPEN, neither (cancelled, preempted) -> the next one

What counts: a transfer gone wrong, an engine's error, a timeout, a partner not reached, a refusal other than for want of room.
Not: what the client asked for or broke off, preemption, draining. A success is a request whose first token came by way of the worker.
Pure but for what it logs; owned by the event loop's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pd_serve.config import BreakerConfig
from pd_serve.ids import PeerId
from pd_serve.observe import Metrics
from pd_serve.protocol.link import Role
from router.generation import Generation
from router.moves import MoveReason
from router.policy.base import Demand, Leg, WorkerView
from router.policy.candidates import could_any_hold
from router.policy.columns import WorkerTable

logger = logging.getLogger(__name__)

COUNTED = frozenset({MoveReason.TRANSFER, MoveReason.TIMEOUT, MoveReason.ENGINE, MoveReason.REFUSED, MoveReason.PEER_LOST})
_MOST_DOUBLINGS = 5
_MOST_RESULTS = 1000


class BreakerState(Enum):
    """Its place is the value of pd_serve_breaker_state."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(slots=True)
class Breaker:
    """Of one leg of one worker. Times are monotonic seconds."""

    settings: BreakerConfig
    num_failures: int = 0
    """In a row."""
    num_probes_failed: int = 0
    """In a row."""
    open_until: float | None = None
    """None: closed."""
    probe: int | None = None
    """Key of the choice that is under way as the probe."""
    results: deque[tuple[float, bool]] = field(default_factory=deque)
    """(when, whether it failed) within the window."""

    def state(self, now: float) -> BreakerState:
        if self.open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.open_until else BreakerState.HALF_OPEN

    def takes(self, now: float) -> bool:
        """A request may be sent: there is no trouble, or it would be the one probe."""
        return self.open_until is None or (self.probe is None and now >= self.open_until)

    def sent(self, key: int, now: float) -> None:
        if self.open_until is not None and self.takes(now):
            self.probe = key

    def succeeded(self, key: int, now: float) -> None:
        """Closes, if this was the probe. Of a request sent before it opened a success says nothing new."""
        self.num_failures = 0
        if self.open_until is None:
            self._note(now, has_failed=False)
        elif key == self.probe:
            self.open_until = self.probe = None
            self.num_probes_failed = 0
            self.results.clear()

    def failed(self, key: int, now: float) -> None:
        if self.open_until is not None:
            if key == self.probe:
                self.probe = None
                self.num_probes_failed = min(self.num_probes_failed + 1, _MOST_DOUBLINGS)
                self._open(now)
            return
        self.num_failures += 1
        self._note(now, has_failed=True)
        num_failed = sum(failed for _, failed in self.results)
        is_often = len(self.results) >= self.settings.window_requests and num_failed >= self.settings.failure_share * len(self.results)
        if self.num_failures >= self.settings.failures_in_a_row or is_often:
            self._open(now)

    def left(self, key: int) -> None:
        """The attempt ended, and nothing is to be learnt from it. Idempotent, also after one of the others."""
        if key == self.probe:
            self.probe = None

    def _open(self, now: float) -> None:
        self.open_until = now + self.settings.open_s * 2**self.num_probes_failed

    def _note(self, now: float, has_failed: bool) -> None:
        self.results.append((now, has_failed))
        while self.results and (now - self.results[0][0] > self.settings.window_s or len(self.results) > _MOST_RESULTS):
            self.results.popleft()


class Breakers:
    """sent -> spoke (or not) -> ended, for each attempt. Of workers that never failed nothing is kept: without trouble a request costs
    a few looks at an empty dict.
    """

    def __init__(self, settings: BreakerConfig, metrics: Metrics, linked: Container[PeerId]) -> None:
        """`linked`: of which workers to keep anything."""
        self._settings = settings
        self._metrics = metrics
        self._linked = linked
        self._breakers: dict[_Key, Breaker] = {}
        self._told: dict[_Key, BreakerState] = {}

    def usable(self, demand: Demand, workers: Sequence[WorkerView], now: float) -> Sequence[WorkerView]:
        """Without those whose breaker is open, as long as others could take the request, now or later.

        A prefill worker can be done without where a healthy worker decodes: that one computes prompts too.
        """
        if not self._breakers:
            return workers
        healthy: Sequence[WorkerView]
        if type(workers) is WorkerTable:
            troubled = {peer for peer, _ in self._breakers}
            healthy = workers.without([peer for peer in troubled if (worker := workers.find(peer)) and not self._takes(worker, now)])
        else:
            healthy = tuple(worker for worker in workers if self._takes(worker, now))
        return healthy if could_any_hold(demand, healthy) else workers

    def sent(self, generation: Generation, now: float) -> None:
        """An attempt begins."""
        for key, breaker in self._of(generation):
            breaker.sent(generation.key, now)
            self._tell(key, breaker, now)

    def spoke(self, generation: Generation, now: float) -> None:
        """The first token came: both legs did what they should."""
        for key, breaker in self._of(generation):
            breaker.succeeded(generation.key, now)
            self._tell(key, breaker, now)

    def ended(self, generation: Generation, now: float) -> None:
        """The attempt is over, in whatever way: one that ended well was a success when it spoke. Idempotent, once the generation is charged
        to nobody.
        """
        if not generation.charged:
            return
        fault = generation.lifecycle.fault
        if fault is not None and fault[0] in COUNTED and fault[1] in self._linked and self._settings.enabled:
            reason, blamed = fault
            key = (blamed, Leg.DECODE if blamed == generation.charged[-1] else Leg.PREFILL)
            breaker = self._breakers.setdefault(key, Breaker(self._settings))
            breaker.failed(generation.key, now)
            self._tell(key, breaker, now, reason.value)
        for _, breaker in self._of(generation):
            breaker.left(generation.key)

    def forget(self, peer: PeerId) -> None:
        """Its link is gone."""
        self._breakers = {key: breaker for key, breaker in self._breakers.items() if key[0] != peer}
        self._told = {key: state for key, state in self._told.items() if key[0] != peer}
        self._export()

    def states(self, peer: PeerId, now: float) -> tuple[tuple[Leg, BreakerState, int], ...]:
        """(leg, state, failures in a row) of the legs that have failed at all."""
        return tuple((leg, breaker.state(now), breaker.num_failures) for (of, leg), breaker in self._breakers.items() if of == peer)

    def refresh(self, now: float) -> None:
        """Before metrics are read: an open one becomes half-open by time alone."""
        for key, breaker in self._breakers.items():
            self._tell(key, breaker, now)

    def _of(self, generation: Generation) -> tuple[tuple[_Key, Breaker], ...]:
        """Those of the legs of its attempt: decode is charged last."""
        if not self._breakers or not generation.charged:
            return ()
        *prefill, decode = generation.charged
        keys = (*((peer, Leg.PREFILL) for peer in prefill), (decode, Leg.DECODE))
        return tuple((key, self._breakers[key]) for key in keys if key in self._breakers)

    def _takes(self, worker: WorkerView, now: float) -> bool:
        breaker = self._breakers.get((worker.peer, Leg.PREFILL if worker.role is Role.PREFILL else Leg.DECODE))
        return breaker is None or breaker.takes(now)

    def _tell(self, key: _Key, breaker: Breaker, now: float, why: str = "") -> None:
        """Metrics and log, where the state is another."""
        state = breaker.state(now)
        before = self._told.get(key, BreakerState.CLOSED)
        if state is before:
            return
        self._told[key] = state
        self._export()
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        detail = f" after {breaker.num_failures} failures in a row, the last: {why}" if why else ""
        logger.log(level, "breaker of %s, %s leg: %s -> %s%s", key[0], key[1].value, before.value, state.value, detail)

    def _export(self) -> None:
        self._metrics.clear("pd_serve_breaker_state")
        for (peer, leg), state in self._told.items():
            self._metrics.record("pd_serve_breaker_state", _ORDER.index(state), peer.worker_id, leg.value)


_Key = tuple[PeerId, Leg]
_ORDER: Sequence[BreakerState] = tuple(BreakerState)
