"""How long tests wait for what must happen. A busy machine makes a wait longer, never a test fail."""

from __future__ import annotations

import time

PATIENCE_S = 60.0
"""For what takes milliseconds wherever nothing is wrong: only a failing test waits that long."""
_MOST_OF_A_TURN = 4.0
_WAKE_UP_S = 10e-6
"""Processor time of a wake-up where the shares that tests allow to idle things were measured."""
_DEAREST = 10.0
_NUM_NAPS = 100
_NAP_S = 1e-3


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


def idle_share(share: float) -> float:
    """Of a core, that something idle may use here: `share` where a wake-up costs 10 us, more where this machine, now, has dearer ones.

    In a virtual machine that shares its cores a wake-up was seen to cost 35 us. What spins uses a whole core anywhere.
    """
    before = time.thread_time()
    for _ in range(_NUM_NAPS):
        time.sleep(_NAP_S)
    price = (time.thread_time() - before) / _NUM_NAPS / _WAKE_UP_S
    return share * min(max(price, 1.0), _DEAREST)
