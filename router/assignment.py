"""Which waiting choice goes where now, and what is counted of it there: looks at the workers for the dispatcher, which then acts.

The oldest goes first. One that cannot go holds the others up, but for short prompts where all that is missing is compute: they take
nothing that it waits for.

    next -> taken -> reserved -> sent_prefill -> prefilled -> spoke ... -> left         (local: without the two in the middle)
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pd_serve.ids import PeerId
from router.generation import Generation
from router.lifecycle import Assigned
from router.load import LoadBook
from router.policy.base import Demand, Leg, Route, WorkerView
from router.policy.candidates import could_hold, waits_for_compute_only
from router.policy.chooser import RouteChooser
from router.pool import WorkerPool
from router.queue import ChoiceQueue
from router.throughput import Throughput


class Assigner:
    """Keeps the load book. `now`: monotonic seconds, as all times here."""

    def __init__(self, pool: WorkerPool, chooser: RouteChooser, speeds: Throughput, now: Callable[[], float]) -> None:
        self.book = LoadBook(chooser.settings.short_prompt_tokens)
        self._pool = pool
        self._speeds = speeds
        self._chooser = chooser
        self._now = now

    def is_empty(self) -> bool:
        """Nothing is counted anywhere."""
        return self.book.is_empty() and self._speeds.is_idle()

    def next(self, queue: ChoiceQueue, settle: Callable[[Generation, tuple[WorkerView, ...]], bool]) -> tuple[Generation, Route] | None:
        """The choice that can go, and where; it stays in the queue. None: all must wait. `settle` is asked about one that finds no place:
        True: it has changed, or left.
        """
        if queue.num_passed_over:
            present = self.views()
            queue.take_back(lambda generation: any(could_hold(generation.demand, view) for view in present))
        while (generation := queue.head()) is not None:
            demand = generation.demand
            views = self._pool.breakers.usable(demand, self.views(), self._now())
            route = self._chooser.choose(demand, views)
            if route is not None:
                return generation, route
            if settle(generation, views):
                continue
            if generation.is_returned and _is_too_long(demand, views):
                queue.pass_over(generation)
                continue
            short = queue.short_head()
            if short is None or not waits_for_compute_only(demand, views, self._chooser.settings):
                return None
            route = self._chooser.choose(short.demand, views)
            return None if route is None else (short, route)
        return None

    def views(self) -> tuple[WorkerView, ...]:
        """Every worker that takes requests, as of now."""
        pool, book, speeds, now = self._pool, self.book, self._speeds, self._now()
        stale_before = now - self._chooser.settings.stale_after_s
        views = [
            book.view(worker, pool.is_joining(worker), speeds.tokens_per_s(worker.peer), stale_before)
            for worker in pool.workers
            if worker.is_available
        ]
        return tuple(as_worst_known(views) if any(view.is_stale for view in views) else views)

    # ---- what has become of it

    def taken(self, generation: Generation, route: Route) -> Assigned:
        """It left the queue for this route."""
        demand, decode = generation.demand, route.decode.peer
        prefill = None if route.prefill is None else route.prefill.peer
        self.book.charge(generation.key, prefill, decode, demand.num_tokens, self._chooser.num_to_compute(demand, route))
        generation.charge((decode,) if prefill is None else (prefill, decode))
        self._pool.breakers.sent(generation, self._now())
        return Assigned(prefill, decode)

    def reserved(self, generation: Generation, peer: PeerId, now: float) -> None:
        """The decode worker has room for it, and begins to compute the prompt if nobody else does."""
        self.book.told(generation.key, peer, now)
        if generation.charged == (peer,):
            self._speeds.began(peer, generation.key, now)

    def sent_prefill(self, generation: Generation, peer: PeerId, now: float) -> None:
        self.book.told(generation.key, peer, now)
        self._speeds.began(peer, generation.key, now)

    def prefilled(self, generation: Generation, peer: PeerId, num_computed_tokens: int, now: float) -> None:
        """The prefill worker is done with the prompt."""
        generation.prefilled_at = now
        self.book.prefilled(generation.key, peer)
        self._speeds.ended(peer, generation.key, num_computed_tokens, now)

    def spoke(self, generation: Generation, num_cached_tokens: int, now: float) -> None:
        """The first token of an attempt: the prompt, with what was generated before, is computed, and the decode worker has it."""
        generation.has_spoken = True
        num_computed_tokens = max(1, generation.num_tokens - 1 - max(0, num_cached_tokens))
        for peer in generation.charged:
            self.book.prefilled(generation.key, peer)
            self._speeds.ended(peer, generation.key, num_computed_tokens, now)
        self._pool.breakers.spoke(generation, now)
        if generation.prefilled_at:
            self._speeds.handed_over(now - generation.prefilled_at)

    def left(self, generation: Generation, now: float) -> None:
        """It has nothing to do with its workers any more. Idempotent."""
        self.book.release(generation.key, generation.charged)
        for peer in generation.charged:
            self._speeds.left(peer, generation.key, now)
        self._pool.breakers.ended(generation, now)
        generation.charged = ()
        generation.has_spoken = False
        generation.prefilled_at = 0.0

    def forget(self, peer: PeerId) -> None:
        """The worker is gone."""
        self.book.forget(peer)
        self._speeds.forget(peer)
        self._chooser.forget(peer)

    def predicted_ttft_s(self, num_tokens: int, num_queued_tokens: int = 0) -> float:
        """Of a prompt of so many tokens that comes now behind so many that wait here, and those in the workers' own queues: what waits is
        shared out to all that compute prompts, by their speeds. Infinite while there is none. O(workers).
        """
        views = self.views()
        computing = [view for view in views if not view.can_decode] or [view for view in views if view.can_decode]
        if not computing:
            return float("inf")
        backlog = num_queued_tokens + sum(view.prefill_backlog_tokens for view in computing)
        rates = [view.prefill_tokens_per_s for view in computing]
        return backlog / sum(rates) + num_tokens / max(rates)


def _is_too_long(demand: Demand, views: tuple[WorkerView, ...]) -> bool:
    """For all that are here, however long it waits for them."""
    return any(view.can_decode for view in views) and not any(could_hold(demand, view) for view in views)


def as_worst_known(views: list[WorkerView]) -> list[WorkerView]:
    """Workers that have not reported for long are taken for as loaded as the most loaded of those that have: not known is not idle."""
    fresh = [view for view in views if not view.is_stale]
    backlog = max((view.load(Leg.PREFILL) for view in fresh), default=0)
    decode_tokens = max((view.decode_tokens for view in fresh), default=0)
    num_sequences = max((view.num_sequences for view in fresh), default=0)
    return [
        msgspec.structs.replace(
            view,
            prefill_backlog_tokens=max(view.prefill_backlog_tokens, backlog),
            decode_tokens=max(view.decode_tokens, decode_tokens),
            num_sequences=max(view.num_sequences, num_sequences),
        )
        if view.is_stale
        else view
        for view in views
    ]
