"""Choices that wait for a worker: first come, first served by arrival of the request. Used by the dispatcher only.

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

    def __init__(self, occupancy: Occupancy) -> None:
        self._heap: list[tuple[int, Generation]] = []
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

    def head(self) -> Generation | None:
        """The oldest; it stays."""
        while self._heap:
            generation = self._heap[0][1]
            if generation.is_queued:
                return generation
            heapq.heappop(self._heap)
        return None

    def leave(self, generation: Generation) -> None:
        """Idempotent."""
        if not generation.is_queued:
            return
        generation.is_queued = False
        self._num_queued -= 1
        self._occupancy.set_queued(self._num_queued)
        if self._heap[0][1] is generation:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * self._num_queued + _FEW:
            self._heap = [entry for entry in self._heap if entry[1].is_queued]
            heapq.heapify(self._heap)
