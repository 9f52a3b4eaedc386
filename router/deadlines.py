"""The longest a request may take, with one timer for all of them: a timer each would cost more than all else that is kept of a request.

Used by the dispatcher only. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import takewhile

from router.generation import Generation


class Deadlines:
    """`generations`: those that are open, in the order of `submitted_at`. `on_overdue` takes each that has taken too long out of there."""

    def __init__(
        self, timeout_s: float, now: Callable[[], float], generations: Mapping[int, Generation], on_overdue: Callable[[Generation], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._now = now
        self._generations = generations
        self._on_overdue = on_overdue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def added(self) -> None:
        """There is one more."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        """End those whose time is up, and come again for the next. The loop's clock wakes, ours measures: it may be a little early."""
        self._timer = None
        for generation in list(takewhile(lambda generation: self._left_s(generation) <= 0, self._generations.values())):
            self._on_overdue(generation)
        oldest = next(iter(self._generations.values()), None)
        if oldest is not None:
            self._timer = self._loop.call_later(max(0.001, self._left_s(oldest)), self._look)

    def _left_s(self, generation: Generation) -> float:
        return generation.submitted_at + self._timeout_s - self._now()
