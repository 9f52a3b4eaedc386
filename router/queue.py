"""Choices that wait for a worker: by priority class, in a class fairly between tenants (fair.py), of a tenant in order of arrival; short
prompts may pass others that wait for compute alone. Used by the dispatcher only.

    returned   what was moved away from a worker: its client has waited already, so it comes before all classes; but one that is too long
               for all workers that are here is passed over until there is another
    class 0    most urgent: always before class 1, and so on,
    class n    but when its oldest choice has waited for `ageing_s`, every AGED_TURN-th start is of a class that has aged

So a lower class is never starved: from `ageing_s` on it moves at an AGED_TURN-th of the pace of everything, however much comes above.
Of several that have aged, the one whose oldest has waited longest has the turn. Every operation takes a logarithm of what waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from router.fair import Ahead, FairClass, clear_leftovers, first_waiting
from router.generation import Generation
from router.moves import MoveReason
from router.occupancy import Occupancy
from router.tenants import Ticket

AGED_TURN = 8


@dataclass(frozen=True, slots=True)
class QueueRules:
    num_classes: int = 1
    ageing_s: float = 10.0


class ChoiceQueue:
    """push -> head ... -> leave; started() besides leave() for what is assigned, finished() for what has ended.

    `Generation.is_queued` says who is in; `occupancy` is kept up to date.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        short_tokens: int = 0,
        rules: QueueRules = QueueRules(),
        now: Callable[[], float] = lambda: 0.0,
        expected_tokens: Callable[[Generation], float] = lambda generation: 0.0,
    ) -> None:
        """`short_tokens`: as RoutingSettings.short_prompt_tokens. `expected_tokens`: output that a choice is likely to have yet."""
        self._classes = tuple([FairClass(short_tokens) for _ in range(rules.num_classes)])
        self._returned: list[tuple[int, Generation]] = []
        self._num_returned = 0
        self._num_returned_tokens = self._num_returned_to_compute = 0
        self._passed_over: list[Generation] = []
        self._short_tokens = short_tokens
        self._ageing_s = rules.ageing_s
        self._now = now
        self._expected_tokens = expected_tokens
        self._num_passed = 0
        """Starts above a class that has aged, since it had a turn."""
        self._num_queued = 0
        self._occupancy = occupancy

    def __len__(self) -> int:
        return self._num_queued

    @property
    def num_passed_over(self) -> int:
        return len(self._passed_over)

    def push(self, generation: Generation) -> None:
        """Back in its old place, if it was here before; before all others, if it had begun. Precondition: it is not in."""
        assert not generation.is_queued
        of_class = self._class_of(generation)
        if generation.paid:
            of_class.charge(generation, float(generation.num_tokens) if generation.lifecycle.num_output_tokens else 0.0)
        generation.is_queued = True
        generation.cost = generation.num_tokens + self._expected_tokens(generation)
        generation.is_returned = generation.is_returned or generation.reason not in (MoveReason.FIRST, MoveReason.NO_CAPACITY)
        if generation.is_returned:
            self._num_returned += 1
            self._num_returned_tokens += generation.num_tokens
            self._num_returned_to_compute += generation.num_to_compute
            heapq.heappush(self._returned, (generation.key, generation))
        else:
            of_class.push(generation)
        self._count(generation, 1)

    def head(self) -> Generation | None:
        """The next; it stays."""
        return first_waiting(self._returned) or self._head_of_classes(is_short=False)

    def short_head(self) -> Generation | None:
        """The next of those with a short prompt."""
        returned = first_waiting(self._returned)
        if returned is not None and returned.num_tokens <= self._short_tokens:
            return returned
        return self._head_of_classes(is_short=True)

    def leave(self, generation: Generation) -> None:
        """Idempotent."""
        if not generation.is_queued:
            return
        generation.is_queued = False
        if generation.is_returned:
            self._num_returned -= 1
            self._num_returned_tokens -= generation.num_tokens
            self._num_returned_to_compute -= generation.num_to_compute
            clear_leftovers(self._returned, self._num_returned)
        else:
            self._class_of(generation).left(generation)
        self._count(generation, -1)

    def pass_over(self, generation: Generation) -> None:
        """Others go before it until take_back(). Precondition: it is in."""
        self.leave(generation)
        self._passed_over.append(generation)

    def take_back(self, fits: Callable[[Generation], bool]) -> None:
        """Those that were passed over and that now have a place to wait for."""
        passed_over, self._passed_over = self._passed_over, []
        for generation in passed_over:
            if fits(generation):
                self.push(generation)
            else:
                self._passed_over.append(generation)

    def started(self, generation: Generation) -> None:
        """It has left because it was assigned."""
        of_class = self._class_of(generation)
        of_class.charge(generation, generation.cost)
        if not self._num_queued:
            self._num_passed = 0
            return
        if generation.is_returned:
            return
        rank = generation.ticket.rank
        is_turn = any(above.num_queued for above in self._classes[:rank])
        self._num_passed = 0 if is_turn or self._aged(rank) is None else self._num_passed + 1

    def finished(self, generation: Generation) -> None:
        """It has ended, well or not: its tenant is charged what it took. Idempotent for what never started."""
        if self._passed_over and generation in self._passed_over:
            self._passed_over.remove(generation)
        if generation.paid:
            self._class_of(generation).charge(generation, float(generation.num_tokens))

    def ahead_of(self, ticket: Ticket) -> Ahead:
        """What would start before a choice that came now, if nothing else came; turns of aged classes not counted."""
        own = self._classes[ticket.rank].ahead_of(ticket.tenant)
        above = self._classes[: ticket.rank]
        return Ahead(
            own.num_choices + self._num_returned + sum([of_class.num_queued for of_class in above]),
            own.num_tokens + self._num_returned_tokens + sum([of_class.num_tokens for of_class in above]),
            own.num_to_compute + self._num_returned_to_compute + sum([of_class.num_to_compute for of_class in above]),
        )

    def _head_of_classes(self, is_short: bool) -> Generation | None:
        for rank, of_class in enumerate(self._classes):
            if of_class.num_queued:
                if self._num_passed >= AGED_TURN - 1 and (aged := self._aged(rank)) and (turn := aged.head(is_short)):
                    return turn
                if (generation := of_class.head(is_short)) is not None:
                    return generation
        return None

    def _aged(self, rank: int) -> FairClass | None:
        """The class that has aged longest, of those below."""
        found: FairClass | None = None
        since = self._now() - self._ageing_s
        for of_class in self._classes[rank + 1 :]:
            if of_class.num_queued and (oldest := of_class.oldest()) is not None and oldest.submitted_at <= since:
                found, since = of_class, oldest.submitted_at
        return found

    def _class_of(self, generation: Generation) -> FairClass:
        return self._classes[generation.ticket.rank]

    def _count(self, generation: Generation, change: int) -> None:
        self._num_queued += change
        rank = generation.ticket.rank
        self._occupancy.set_queued(self._num_queued)
        self._occupancy.set_class(rank, self._classes[rank].num_queued)
