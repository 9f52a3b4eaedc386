"""Choices that wait for a worker: first come, first served by arrival of the request; short prompts may pass others that wait for compute
alone. Used by the dispatcher only.

One that leaves from the middle stays in the heap until it comes up or such leftovers are the majority: taken over many, an operation costs
no more than a logarithm of the length.
"""

from __future__ import annotations

import heapq

from router.generation import Generation
from router.occupancy import Occupancy

_FEW = 16
"""Leftovers that are not worth clearing away."""


class ChoiceQueue:
    """push -> head ... -> leave. `Generation.is_queued` says who is in; `occupancy` is kept up to date."""

    def __init__(self, occupancy: Occupancy, short_tokens: int = 0) -> None:
        """`short_tokens`: as RoutingSettings.short_prompt_tokens."""
        self._heap: list[tuple[int, Generation]] = []
        self._short: list[tuple[int, Generation]] = []
        """The short ones of these."""
        self._short_tokens = short_tokens
        self._num_queued = 0
        self._occupancy = occupancy

    def __len__(self) -> int:
        return self._num_queued

    def push(self, generation: Generation) -> None:
        """Back in its old place, if it was here before. Precondition: it is not in."""
        assert not generation.is_queued
        generation.is_queued = True
        self._num_queued += 1
        self._occupancy.set_queued(self._num_queued)
        heapq.heappush(self._heap, (generation.key, generation))
        if generation.num_tokens <= self._short_tokens:
            heapq.heappush(self._short, (generation.key, generation))

    def head(self) -> Generation | None:
        """The oldest; it stays."""
        return _first(self._heap)

    def short_head(self) -> Generation | None:
        """The oldest of those with a short prompt."""
        return _first(self._short)

    def leave(self, generation: Generation) -> None:
        """Idempotent."""
        if not generation.is_queued:
            return
        generation.is_queued = False
        self._num_queued -= 1
        self._occupancy.set_queued(self._num_queued)
        for heap in (self._heap, self._short):
            if heap and heap[0][1] is generation:
                heapq.heappop(heap)
            elif len(heap) > 2 * self._num_queued + _FEW:
                heap[:] = [entry for entry in heap if entry[1].is_queued]
                heapq.heapify(heap)


def _first(heap: list[tuple[int, Generation]]) -> Generation | None:
    while heap:
        generation = heap[0][1]
        if generation.is_queued:
            return generation
        heapq.heappop(heap)
    return None
