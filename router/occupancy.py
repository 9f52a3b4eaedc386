"""How much is in progress: what the limits of admission are held against. Of one process, or of all processes of one router together.

In a block of memory shared by the processes each writes its own two numbers and reads all. Counting one in takes the block's lock, so that
the limit holds exactly; the kernel lets go of a lock whose holder died, and the supervisor clears the numbers of a process that ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

_NUMBERS = 2
"""By process: requests open, choices queued; 64 bits each."""
_MAX_TRIES = 1000
"""The lock is held for about a microsecond. A holder that was stopped just then may not stop the others: they go on without."""


class Occupancy(Protocol):
    @property
    def num_open(self) -> int:
        """Client requests in progress, of all processes."""
        ...

    @property
    def num_queued(self) -> int:
        """Choices waiting for a worker, of all processes."""
        ...

    def enter(self, limit: int) -> bool:
        """Count one request more. False, having counted nothing: there are `limit` already."""
        ...

    def leave(self) -> None:
        """One that entered here is done."""
        ...

    def set_queued(self, num_queued: int) -> None:
        """So many choices wait here."""
        ...


class OwnOccupancy:
    """Of a router that is one process."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0

    def enter(self, limit: int) -> bool:
        if self.num_open >= limit:
            return False
        self.num_open += 1
        return True

    def leave(self) -> None:
        self.num_open -= 1

    def set_queued(self, num_queued: int) -> None:
        self.num_queued = num_queued


class SharedOccupancy:
    """Of one process among several; `index` is its place in the block. The descriptor stays the caller's, and open."""

    def __init__(self, descriptor: int, index: int, num_processes: int) -> None:
        self._descriptor = descriptor
        self._numbers = memoryview(mmap.mmap(descriptor, _NUMBERS * 8 * num_processes)).cast("q")
        self._open_at = _NUMBERS * index
        self._queued_at = self._open_at + 1

    @property
    def num_open(self) -> int:
        return sum(self._numbers[::_NUMBERS])

    @property
    def num_queued(self) -> int:
        return sum(self._numbers[1::_NUMBERS])

    def enter(self, limit: int) -> bool:
        is_locked = self._lock()
        try:
            if self.num_open >= limit:
                return False
            self._numbers[self._open_at] += 1
            return True
        finally:
            if is_locked:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def leave(self) -> None:
        self._numbers[self._open_at] -= 1

    def set_queued(self, num_queued: int) -> None:
        self._numbers[self._queued_at] = num_queued

    def clear(self, index: int) -> None:
        """The process at that place has ended: nothing of it is in progress. For the supervisor."""
        self._numbers[_NUMBERS * index] = self._numbers[_NUMBERS * index + 1] = 0

    def _lock(self) -> bool:
        for _ in range(_MAX_TRIES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            return True
        return False


def shared_block(num_processes: int) -> int:
    """Descriptor of a new block, all zero, for processes that inherit it."""
    descriptor = os.memfd_create("pd-serve-router")
    os.ftruncate(descriptor, _NUMBERS * 8 * num_processes)
    return descriptor
