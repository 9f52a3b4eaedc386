"""Which waiting choice goes where now, and what is counted of it there: looks at the workers for the dispatcher, which then acts.

The oldest goes first. One that cannot go holds the others up, but for short prompts where all that is missing is compute: they take
nothing that it waits for.

    next -> taken -> reserved -> sent_prefill -> prefilled -> spoke ... -> left         (local: without the two in the middle)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pd_serve.ids import PeerId
from router.generation import Generation
from router.lifecycle import Assigned
from router.load import LoadBook
from router.policy.base import Demand, Route, WorkerView
from router.policy.candidates import could_any_hold, longest_model_len, waits_for_compute_only
from router.policy.chooser import RouteChooser
from router.pool import WorkerPool
from router.queue import ChoiceQueue
from router.roster import Roster
from router.throughput import Throughput
from router.totals import least_uncached, totals_of


class Assigner:
    """Keeps the load book. `now`: monotonic seconds, as all times here."""

    def __init__(self, pool: WorkerPool, chooser: RouteChooser, speeds: Throughput, now: Callable[[], float]) -> None:
        self.book = LoadBook(chooser.settings.short_prompt_tokens)
        self._pool = pool
        self._speeds = speeds
        self._chooser = chooser
        self._now = now
        self._roster = Roster(pool, chooser, self.book, speeds, now)

    def is_empty(self) -> bool:
        """Nothing is counted anywhere."""
        return self.book.is_empty() and self._speeds.is_idle()

    def next(self, queue: ChoiceQueue, settle: Callable[[Generation, Sequence[WorkerView]], bool]) -> tuple[Generation, Route] | None:
        """The choice that can go, and where; it stays in the queue. None: all must wait. `settle` is asked about one that finds no place:
        True: it has changed, or left.
        """
        if queue.num_passed_over:
            present = self.views()
            queue.take_back(lambda generation: could_any_hold(generation.demand, present))
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

    def views(self) -> Sequence[WorkerView]:
        """Every worker that takes requests, as of now, and good until something changes."""
        return self._roster.look()

    def num_to_compute(self, demand: Demand, views: Sequence[WorkerView]) -> int:
        """Tokens of a prompt, where most of it is cached of all that compute prompts; all, where nothing depends on that here."""
        return least_uncached(views, demand) if self._chooser.reads_cached else demand.num_tokens

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
        shared out to all that compute prompts, by their speeds. Infinite while there is none.
        """
        totals = totals_of(self.views())
        if not totals.prefill_tokens_per_s:
            return float("inf")
        return (num_queued_tokens + totals.num_tokens_computing) / totals.prefill_tokens_per_s + num_tokens / totals.one_tokens_per_s


def _is_too_long(demand: Demand, views: Sequence[WorkerView]) -> bool:
    """For all that are here, however long it waits for them."""
    return longest_model_len(views) > 0 and not could_any_hold(demand, views)
