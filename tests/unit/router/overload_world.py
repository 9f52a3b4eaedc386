"""The real dispatcher in virtual time, over one worker that computes prompts one after the other and decodes all sequences in steps."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry

from pd_serve.clock import VirtualClock
from pd_serve.config import BreakerConfig
from pd_serve.errors import OverloadedError
from pd_serve.ids import AttemptId, PeerId
from pd_serve.kv.prefix_chain import SHORT_NBYTES, chain_digests
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.cache_events import CacheEvents
from pd_serve.protocol.link import Cancel, FinishReason, Open, Reserved, Role, RouterFrame, Step, TokenOutput
from router.assignment import Assigner
from router.breaker import Breakers
from router.dispatcher import Dispatcher, DispatcherSettings
from router.generation import Generation
from router.lifecycle import LifecycleSettings
from router.linked_worker import LinkedWorker
from router.occupancy import OwnOccupancy
from router.overload import OverloadSettings
from router.policy.base import Leg, RoutingSettings
from router.policy.chooser import RouteChooser
from router.policy.least_tokens import LeastTokens
from router.policy.least_ttft import LeastTTFT
from router.prefixes import Prefixes
from router.tenants import NO_TICKET, Ticket
from router.throughput import Throughput
from tests.fakes import block_counts, load, peer_id, peer_info, sampling, welcome

PEER = peer_id("both-0")
WINDOW_TOKENS = 400
BLOCK = 16


@dataclass(frozen=True)
class Speeds:
    prefill_tokens_per_s: float = 10_000.0
    step_s: float = 0.010
    step_s_per_sequence: float = 0.00025
    max_sequences: int = 512


@dataclass(eq=False)
class Asked:
    """One request of a client."""

    came_at: float
    generation: Generation | None = None
    retry_after_s: float = 0.0
    """Of one that was turned away."""
    token_times: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.came_at if self.token_times else float("inf")

    @property
    def itl_s(self) -> float:
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


class World:
    """Create within an event loop. Plays the pool and the worker."""

    def __init__(
        self,
        overload: OverloadSettings,
        speeds: Speeds = Speeds(),
        max_queued: int = 10**6,
        policy: type[LeastTokens | LeastTTFT] = LeastTokens,
    ) -> None:
        self.clock = VirtualClock(1.0)
        self.speeds = speeds
        info = welcome(peer_info(PEER, Role.BOTH), max_model_len=1 << 20)
        self.workers = (LinkedWorker(PEER, "http://x", None, info, load(Role.BOTH, block_counts(1 << 20)), 0.0),)  # type: ignore[arg-type]
        self.prefixes = Prefixes(self.clock.now)
        self.breakers = Breakers(BreakerConfig(), Metrics(CollectorRegistry(), Side.ROUTER), {})
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()
        self._prompts: deque[Open] = deque()
        self._is_computing = self._is_decoding = False
        self._running: dict[AttemptId, int] = {}
        """Tokens left."""
        self._asked: dict[int, Asked] = {}
        """By key of its choice."""
        self._cancelled: set[AttemptId] = set()
        routing = RoutingSettings(0, WINDOW_TOKENS, speeds.max_sequences)
        settings = DispatcherSettings(LifecycleSettings(600.0, 600.0, 3), routing, 600.0, 600.0, max_queued, True, overload)
        chooser = RouteChooser(policy(Leg.PREFILL), policy(Leg.DECODE), routing)
        self._has_cache = chooser.reads_cached
        self._num_published: Counter[int] = Counter()
        """Blocks of its cache: a prompt is one token again and again."""
        self.prefixes.linked(PEER, BLOCK)
        self.prefixes.apply(PEER, CacheEvents(0, b"", num_parts=1))
        self._seqs = itertools.count(1)
        assigner = Assigner(self, chooser, Throughput(), self.clock.now)  # type: ignore[arg-type]
        metrics = Metrics(CollectorRegistry(), Side.ROUTER)
        self.on_change: Callable[[], None] = lambda: None
        self.router = Dispatcher(self, assigner, settings, metrics, self.clock, OwnOccupancy())  # type: ignore[arg-type]

    # ---- clients

    def ask(self, num_tokens: int, max_tokens: int, ticket: Ticket = NO_TICKET, token: int = 1) -> Asked:
        """Now. Turned away: `generation` is None."""
        asked = Asked(self.clock.now())
        try:
            (asked.generation,) = self.router.submit((token,) * num_tokens, (sampling(max_tokens),), lambda: None, ticket=ticket)
        except OverloadedError as error:
            asked.retry_after_s = error.retry_after_s
        else:
            self._asked[asked.generation.key] = asked
        return asked

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._ties), what))  # type: ignore[arg-type]

    def run(self, until: float = float("inf")) -> None:
        """Everything up to then; by default until nothing happens any more."""
        while self._events and self._events[0][0] <= until:
            when, _, what = heapq.heappop(self._events)
            self.clock.advance(max(0.0, when - self.clock.now()))
            what()
        if until < float("inf"):
            self.clock.advance(max(0.0, until - self.clock.now()))

    # ---- the pool

    def is_joining(self, worker: LinkedWorker) -> bool:
        return False

    def send(self, peer: PeerId, frame: RouterFrame) -> bool:
        if isinstance(frame, Open):
            self.at(self.clock.now(), lambda: self._opened(frame))
        elif isinstance(frame, Cancel):
            self._cancelled.add(frame.attempt_id)
        return True

    # ---- the worker

    def _opened(self, frame: Open) -> None:
        self._hears(Reserved(frame.attempt_id, None, 0))
        self._prompts.append(frame)
        if not self._is_computing:
            self._compute()

    def _compute(self) -> None:
        self._is_computing = bool(self._prompts)
        if self._is_computing:
            frame = self._prompts.popleft()
            num_cached = min(self._num_published[frame.token_ids[0]], (len(frame.token_ids) - 1) // BLOCK) * BLOCK
            compute_s = (len(frame.token_ids) - num_cached) / self.speeds.prefill_tokens_per_s
            self.at(self.clock.now() + compute_s, lambda: self._computed(frame, num_cached))

    def _computed(self, frame: Open, num_cached: int) -> None:
        self._running[frame.attempt_id] = frame.sampling.max_tokens
        if self._has_cache:
            self._publish(frame.token_ids)
        self._give([frame.attempt_id], num_cached)
        self.on_change()  # as with PrefillDone, or a report
        self._compute()
        if not self._is_decoding:
            self._decode()

    def _publish(self, token_ids: tuple[int, ...]) -> None:
        num_blocks = len(token_ids) // BLOCK
        num_published = self._num_published[token_ids[0]]
        if num_blocks > num_published:
            digests = list(chain_digests(token_ids, BLOCK, 0, num_blocks))[num_published:]
            self.prefixes.apply(PEER, CacheEvents(next(self._seqs), b"".join(digest[:SHORT_NBYTES] for digest in digests)))
            self._num_published[token_ids[0]] = num_blocks

    def _decode(self) -> None:
        for attempt_id in self._cancelled & self._running.keys():
            del self._running[attempt_id]
        self._is_decoding = bool(self._running)
        if self._is_decoding:
            present = list(self._running)
            step_s = self.speeds.step_s + self.speeds.step_s_per_sequence * len(present)
            self.at(self.clock.now() + step_s, lambda: self._stepped(present))

    def _stepped(self, present: list[AttemptId]) -> None:
        self._give([attempt_id for attempt_id in present if attempt_id in self._running])
        self._decode()

    def _give(self, attempt_ids: list[AttemptId], num_cached: int = 0) -> None:
        outputs: list[TokenOutput] = []
        for attempt_id in attempt_ids:
            self._running[attempt_id] -= 1
            is_last = not self._running[attempt_id]
            outputs.append(TokenOutput(attempt_id, 5, FinishReason.LENGTH if is_last else None, num_cached_tokens=num_cached))
            generation = self.router._by_attempt.get(attempt_id)
            if generation is not None and (asked := self._asked.get(generation.key)) is not None:
                asked.token_times.append(self.clock.now())
            if is_last:
                del self._running[attempt_id]
        self._hears(Step(tuple(outputs)))

    def _hears(self, frame: msgspec.Struct) -> None:
        self.router._frame_arrived(PEER, frame)  # type: ignore[arg-type]
