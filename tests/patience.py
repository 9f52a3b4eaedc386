"""How long tests wait for what must happen. A busy machine makes a wait longer, never a test fail."""

from __future__ import annotations

import time

PATIENCE_S = 60.0
"""For what takes milliseconds wherever nothing is wrong: only a failing test waits that long."""
_MOST_OF_A_TURN = 4.0


class Waiting:
    """The time a loop has waited that looks, then sleeps for `interval_s`.

    A turn counts for four intervals at most, however long it took: time in which a machine gave its processors to others is not counted, so
    a promise of seconds can be asked for on any machine.
    """

    def __init__(self, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_turn_s = _MOST_OF_A_TURN * interval_s
        self._turned_at = time.monotonic()
        self.waited_s = 0.0

    def is_over(self) -> bool:
        """To be asked once a turn."""
        now = time.monotonic()
        self.waited_s += min(now - self._turned_at, self._longest_turn_s)
        self._turned_at = now
        return self.waited_s > self._timeout_s
