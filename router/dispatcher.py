"""Drives each choice's Lifecycle: finds workers, carries frames, keeps the queue, the deadlines and the load book. No text here.

The life of a choice:  queued -> assigned -> tokens ... -> done, and back to queued (in its old place) on every move.

The queue is first come, first served by arrival of the request, bounded by admission, and looked at again whenever a worker reports, joins,
is lost or gives something back. What must stay true: a choice that is done is in no table here. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pd_serve.clock import Clock
from pd_serve.errors import ContextLengthError, NoWorkerError, PdServeError
from pd_serve.ids import AttemptId, PeerId
from pd_serve.observe import Metrics
from pd_serve.protocol.link import (
    Closed,
    Failed,
    Load,
    Open,
    Prefill,
    PrefillDone,
    Refused,
    Reserved,
    RouterFrame,
    Step,
    TokenOutput,
    WorkerFrame,
)
from pd_serve.protocol.sampling import SamplingParams
from router.assignment import Assigner
from router.deadlines import Deadlines
from router.generation import Generation, Readers
from router.lifecycle import (
    Action,
    AwaitHandover,
    CancelRequested,
    Emit,
    Event,
    Finished,
    FrameArrived,
    GaveUp,
    HandoverTimedOut,
    Lifecycle,
    LifecycleSettings,
    NeedAssignment,
    Send,
    TimedOut,
    TokenArrived,
    WorkerLost,
)
from router.moves import MoveReason
from router.occupancy import Occupancy
from router.overload import DEFAULT_OVERLOAD, Asked, Overload, OverloadSettings
from router.policy.base import Demand, RoutingSettings, WorkerView
from router.policy.candidates import longest_model_len, shortest_model_len
from router.pool import WorkerPool
from router.tenants import NO_TICKET, Ticket
from router.timeline import Timeline


@dataclass(frozen=True, slots=True)
class DispatcherSettings:
    lifecycle: LifecycleSettings
    routing: RoutingSettings
    queue_timeout_s: float
    request_timeout_s: float
    max_queued: int
    """Of a class for which `overload` says nothing else."""
    share_prefix: bool
    """Workers keep a prefix cache: further choices of a prompt follow the first to its decode worker."""
    overload: OverloadSettings = DEFAULT_OVERLOAD


class Dispatcher:
    """submit() -> the reader drains Generation.tokens -> done, or cancel(). Create within the event loop.

    The clock measures; the loop's own (uvloop's counts milliseconds) only wakes.
    """

    def __init__(
        self, pool: WorkerPool, assigner: Assigner, settings: DispatcherSettings, metrics: Metrics, clock: Clock, occupancy: Occupancy
    ) -> None:
        self._pool = pool
        self._assigner = assigner
        self._settings = settings
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._now = clock.now
        self._book = assigner.book
        self.timeline = Timeline()
        self._open: dict[int, Generation] = {}
        self._by_attempt: dict[AttemptId, Generation] = {}
        self.overload = Overload(settings.overload, settings.max_queued, occupancy, settings.routing, metrics, clock.now)
        self._queue = self.overload.queue
        self._readers = Readers(self._loop)
        self._deadlines = Deadlines(settings.request_timeout_s, clock.now, self._open, self._timed_out)
        self._keys = itertools.count(1)
        self._attempt_ids = itertools.count(secrets.randbits(62))
        self._first_token = metrics.histogram("pd_serve_time_to_first_token_seconds")
        self._token_gap = metrics.histogram("pd_serve_inter_token_latency_seconds")
        pool.on_frame = self._frame_arrived
        pool.on_lost = self._worker_lost
        pool.on_change = self._pump

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def is_empty(self) -> bool:
        """Nothing is left of any request."""
        return not (self._open or self._by_attempt or not self.overload.is_empty()) and self._assigner.is_empty()

    def submit(
        self,
        token_ids: tuple[int, ...],
        samplings: tuple[SamplingParams, ...],
        wake: Callable[[], None],
        wakes_on_token: bool = True,
        takes_what_fits: bool = False,
        received_at: float = 0.0,
        ticket: Ticket = NO_TICKET,
    ) -> tuple[Generation, ...]:
        """Begin one choice per sampling of one prompt. `wakes_on_token` False: wake is called at the end only.
        `takes_what_fits`: max_tokens may be lowered to what the workers turn out to take. `received_at`: for the timeline.

        Raises OverloadedError when it would have to wait and the queue is full, or would miss an SLO.
        """
        cached, num_cached = self._pool.prefixes.cached(token_ids), 0
        if self.overload.has_slo:
            views = self._assigner.views()
            num_to_compute = self._assigner.num_to_compute(Demand(len(token_ids), 0, cached=cached), views)
            self.overload.check(ticket, Asked(len(token_ids), num_to_compute, len(samplings)), views)
            num_cached = len(token_ids) - num_to_compute
        self._metrics.record("pd_serve_prompt_tokens_total", len(token_ids))
        generations = tuple(self._new(token_ids, sampling, wake, wakes_on_token, takes_what_fits) for sampling in samplings)
        for generation in generations:
            generation.ticket, generation.cached, generation.num_cached_tokens = ticket, cached, num_cached
            self.timeline.arrived(generation.key, len(token_ids), generation.submitted_at, received_at)
        rest, starting = generations[1:], generations
        if rest and self._settings.share_prefix:
            generations[0].followers, starting = rest, generations[:1]
        for generation in starting:
            self._apply(generation, generation.lifecycle.start())
        self._pump()
        if (overflow := self.overload.overflow(starting)) is not None:
            for generation in generations:
                self.cancel(generation)
            raise overflow
        for generation in starting:
            self._arm_queue_timer(generation)
        return generations

    def cancel(self, generation: Generation) -> None:
        """The reader wants no more. Idempotent; both legs are told at once."""
        if generation.key in self._open:
            self._handle(generation, CancelRequested())
            self._close(generation)
            self._pump()

    def close(self, error: PdServeError) -> None:
        """End every choice with an error."""
        for generation in list(self._open.values()):
            self._apply(generation, (*generation.lifecycle.handle(CancelRequested(), self._now()), GaveUp(error)))

    # ---- events

    def _frame_arrived(self, peer: PeerId, frame: WorkerFrame) -> None:
        if isinstance(frame, Step):
            self._step(peer, frame)
        elif isinstance(frame, Load):
            self._book.reported(peer, self._now(), frame.prefill_queue_tokens == 0)
        elif isinstance(frame, Reserved | Refused | PrefillDone | Failed | Closed):
            self._attempt_frame(peer, frame)

    def _step(self, peer: PeerId, frame: Step) -> None:
        """The hot path: once per token."""
        now = self._now()
        by_attempt = self._by_attempt
        has_ended = False
        for token in frame.outputs:
            generation = by_attempt.get(token.attempt_id)
            if generation is None:
                continue
            if generation.lifecycle.takes(peer, token):
                self._emit(generation, token, now)
            elif actions := generation.lifecycle.handle(TokenArrived(peer, token), now):
                self._apply(generation, actions)
                has_ended = True
        if has_ended:
            self._pump()

    def _attempt_frame(self, peer: PeerId, frame: Reserved | Refused | PrefillDone | Failed | Closed) -> None:
        generation = self._by_attempt.get(frame.attempt_id)
        if generation is None:
            return
        if isinstance(frame, Reserved):
            now = self._now()
            self._assigner.reserved(generation, peer, now)
            self.timeline.reserved(generation.key, now)
        elif isinstance(frame, PrefillDone):
            now = self._now()
            self.timeline.prefilled(generation.key, now)
            self._assigner.prefilled(generation, peer, frame.num_computed_tokens, now)
        elif isinstance(frame, Refused):
            self._book.refused(peer)
        self._handle(generation, FrameArrived(peer, frame))
        self._pump()

    def _worker_lost(self, peer: PeerId) -> None:
        self._assigner.forget(peer)
        for generation in list(self._open.values()):
            if peer in generation.lifecycle.peers:
                self._handle(generation, WorkerLost(peer))

    def _handle(self, generation: Generation, event: Event) -> None:
        self._apply(generation, generation.lifecycle.handle(event, self._now()))

    # ---- actions

    def _apply(self, generation: Generation, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Send(peer, frame):
                    self._send(generation, peer, frame)
                case Emit(token):
                    self._emit(generation, token, self._now())
                case NeedAssignment(exclude, reason):
                    self._enqueue(generation, exclude, reason)
                case AwaitHandover(attempt_id, timeout_s):
                    self._loop.call_later(timeout_s, self._handover_timed_out, attempt_id)
                case Finished(reason):
                    generation.finish = reason
                    self._metrics.record("pd_serve_request_seconds", self._now() - generation.submitted_at)
                    self._close(generation)
                    self._readers.wake(generation)
                case GaveUp(error):
                    generation.error = error
                    self._close(generation)
                    self._readers.wake(generation)

    def _send(self, generation: Generation, peer: PeerId, frame: RouterFrame) -> None:
        if isinstance(frame, Prefill):
            self._assigner.sent_prefill(generation, peer, self._now())
        sent = self._pool.send(peer, frame)
        if not sent and isinstance(frame, Open | Prefill):
            self._loop.call_soon(self._handle, generation, WorkerLost(peer))

    def _emit(self, generation: Generation, token: TokenOutput, now: float) -> None:
        last = generation.last_token_at
        generation.last_token_at = now
        if generation.has_spoken:
            self._token_gap.observe(now - last)
        else:
            self._first_of_attempt(generation, token, now, last)
        generation.tokens.append(token)
        if generation.wakes_on_token and not generation.is_woken:
            self._readers.wake(generation)

    def _first_of_attempt(self, generation: Generation, token: TokenOutput, now: float, last: float) -> None:
        """Its worker has done what was asked of it; `last`: the token before came from another, 0 for none."""
        self._assigner.spoke(generation, token.num_cached_tokens, now)
        if last:
            self._token_gap.observe(now - last)
            return
        self._first_token.observe(now - generation.submitted_at)
        self.timeline.first_token(generation.key, now)
        self.overload.began(generation, now)
        self._start_followers(generation)

    def _start_followers(self, generation: Generation) -> None:
        """The first token: the decode worker has the prompt."""
        followers, generation.followers = generation.followers, ()
        if followers:
            decode = generation.lifecycle.peers[:1]
            for follower in followers:
                follower.beside = decode[0] if decode else None
                self._start_follower(follower)
            self._loop.call_soon(self._pump)

    def _start_follower(self, follower: Generation) -> None:
        if follower.key in self._open:
            self._apply(follower, follower.lifecycle.start())
            self._arm_queue_timer(follower)

    # ---- the queue

    def _enqueue(self, generation: Generation, avoid: frozenset[PeerId], reason: MoveReason) -> None:
        if reason is not MoveReason.FIRST:
            self._leave_workers(generation)
            self.timeline.left(generation.key, reason.value, generation.lifecycle.num_output_tokens, self._now())
        if reason is MoveReason.PREEMPTED and generation.lifecycle.fault is not None:
            self._book.refused(generation.lifecycle.fault[1])
        if reason not in (MoveReason.FIRST, MoveReason.NO_CAPACITY):
            self._metrics.count("pd_serve_moves_total", reason.value)
            generation.beside = None
        generation.avoid, generation.reason = avoid, reason
        self._queue.push(generation)
        if reason is not MoveReason.FIRST:
            self._arm_queue_timer(generation)

    def _pump(self) -> None:
        """Assign whatever can be assigned now, oldest first; a short prompt before one that waits for compute alone."""
        while (found := self._assigner.next(self._queue, self._settle_length)) is not None:
            generation, route = found
            self._unqueue(generation)
            assigned = self._assigner.taken(generation, route)
            self._queue.started(generation)
            self._metrics.count("pd_serve_routing_decisions_total", route.kind.value, route.reason)
            now = self._now()
            actions = generation.lifecycle.handle(assigned, now)
            generation.attempt_id = generation.lifecycle.attempt_id
            self.timeline.assigned(generation.key, assigned.prefill, assigned.decode, now, generation.attempt_id or 0)
            if generation.attempt_id is not None:
                self._by_attempt[generation.attempt_id] = generation
            self._apply(generation, actions)

    def _settle_length(self, generation: Generation, views: Sequence[WorkerView]) -> bool:
        """A choice that came before its workers may be too long for all of them: shorten it, or turn it away, lest it hold up others."""
        longest = longest_model_len(views)
        if not longest or generation.num_prompt_tokens + generation.max_tokens <= longest:
            return False
        if generation.shrink(shortest_model_len(views, generation.num_tokens)):
            return True
        if generation.lifecycle.num_output_tokens:
            return False
        error = ContextLengthError(f"This model's maximum context length is {longest} tokens; more were requested", "max_tokens")
        self._apply(generation, (*generation.lifecycle.handle(CancelRequested(), self._now()), GaveUp(error)))
        return True

    def _unqueue(self, generation: Generation) -> None:
        self._queue.leave(generation)
        if generation.queue_timer is not None:
            generation.queue_timer.cancel()
            generation.queue_timer = None

    # ---- beginning and end

    def _new(
        self, token_ids: tuple[int, ...], sampling: SamplingParams, wake: Callable[[], None], wakes_on_token: bool, takes_what_fits: bool
    ) -> Generation:
        lifecycle = Lifecycle(self._settings.lifecycle, token_ids, sampling, self._new_attempt_id)
        generation = Generation(next(self._keys), len(token_ids), lifecycle, sampling.max_tokens, wake, wakes_on_token, takes_what_fits)
        generation.submitted_at = self._now()
        self._open[generation.key] = generation
        self._deadlines.added()
        return generation

    def _new_attempt_id(self) -> AttemptId:
        return AttemptId(next(self._attempt_ids))

    def _arm_queue_timer(self, generation: Generation) -> None:
        if generation.is_queued and generation.queue_timer is None:
            generation.queue_timer = self._loop.call_later(self._settings.queue_timeout_s, self._timed_out, generation)

    def _timed_out(self, generation: Generation) -> None:
        if generation.key in self._open:
            self._handle(generation, TimedOut())
            self._pump()

    def _handover_timed_out(self, attempt_id: AttemptId) -> None:
        generation = self._by_attempt.get(attempt_id)
        if generation is not None:
            self._handle(generation, HandoverTimedOut(attempt_id))
            self._pump()

    def _leave_workers(self, generation: Generation) -> None:
        if generation.attempt_id is not None:
            self._by_attempt.pop(generation.attempt_id, None)
            generation.attempt_id = None
        self._assigner.left(generation, self._now())

    def _close(self, generation: Generation) -> None:
        """Idempotent: out of every table. Followers of a choice that never had a token end as it did."""
        if self._open.pop(generation.key, None) is None:
            return
        self._unqueue(generation)
        self._leave_workers(generation)
        self.overload.ended(generation, self._now())
        num_output_tokens = generation.lifecycle.num_output_tokens
        self._metrics.record("pd_serve_generated_tokens_total", num_output_tokens)
        outcome = generation.finish.value if generation.finish else generation.error.code if generation.error else "cancelled"
        self.timeline.ended(generation.key, outcome, num_output_tokens, self._now())
        followers, generation.followers = generation.followers, ()
        for follower in followers:
            if follower.key in self._open:
                error = generation.error or NoWorkerError("the first choice of this prompt did not begin")
                self._apply(follower, (*follower.lifecycle.handle(CancelRequested(), self._now()), GaveUp(error)))
