"""Rate limits of one tenant: token buckets that refill continuously, each one number, which processes of a router may share.

    full_at     when the bucket will be full again; the past: it is
    level       limit - (full_at - now) * limit / 60, at least what an overdraft left
    take(n)     full_at = max(full_at, now) + n * 60 / limit, if the level stays above zero

Source: virtual scheduling of the generic cell rate algorithm, ITU-T I.371. The monotonic clock is one for all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

WINDOW_S = 60.0


class Cells(Protocol):
    """Numbers, of this process alone or of several."""

    def __getitem__(self, index: int, /) -> float: ...

    def __setitem__(self, index: int, value: float, /) -> None: ...


class Bucket:
    """Holds one minute's worth when full."""

    __slots__ = ("_cells", "_index", "_lock", "_s_per_unit", "limit")

    def __init__(self, limit: int, cells: Cells, index: int, lock: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """`limit`: per minute, at least 1. `cells[index]` starts as 0. `lock`: held while the number changes."""
        self.limit = limit
        self._s_per_unit = WINDOW_S / limit
        self._cells = cells
        self._index = index
        self._lock = lock

    def take(self, num: int, now: float) -> float:
        """0: taken. Else nothing is taken, and it is the seconds after which it could be; infinity: never."""
        if num > self.limit:
            return float("inf")
        with self._lock():
            full_at = max(self._cells[self._index], now) + num * self._s_per_unit
            if (wait_s := full_at - now - WINDOW_S) > 1e-9:
                return wait_s
            self._cells[self._index] = full_at
        return 0.0

    def overdraw(self, num: int, now: float) -> None:
        """Take them whether there are so many or not; negative: give back."""
        with self._lock():
            self._cells[self._index] = max(self._cells[self._index], now) + num * self._s_per_unit

    def remaining(self, now: float) -> int:
        return max(0, int((WINDOW_S - self.reset_s(now)) / self._s_per_unit + 1e-6))

    def reset_s(self, now: float) -> float:
        """Until it is full."""
        return max(0.0, self._cells[self._index] - now)


def shown_duration(seconds: float) -> str:
    """As OpenAI writes it in `x-ratelimit-reset-requests`: `120ms`, `8.64s`, `6m0s`."""
    millis = max(0, round(seconds * 1000))
    if millis < 1000:
        return f"{millis}ms" if millis else "0s"
    minutes, rest = divmod(millis, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{text}s" if minutes else f"{text}s"
