"""How much is in progress: what the limits of admission are held against. Of one process, or of all processes of one router together.

In a block of memory shared by the processes each writes its own two numbers and reads all. Counting one in takes the block's lock, so that
the limit holds exactly; the kernel lets go of a lock whose holder died, and the supervisor clears the numbers of a process that ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from router.rates import Cells

MAX_CLASSES = 8
"""Of priority."""
_NUMBERS = 2 + MAX_CLASSES
"""By process: requests open, choices queued, and these by class; 64 bits each."""
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

    def set_class(self, rank: int, num_queued: int) -> None:
        """So many of that priority class."""
        ...

    def num_queued_of(self, rank: int) -> int:
        """Of all processes."""
        ...

    @property
    def cells(self) -> Cells:
        """Numbers of all processes, zero at first: what rate limits have left."""
        ...

    def locked(self) -> AbstractContextManager[None]:
        """No other process changes what all of them change."""
        ...


class OwnOccupancy:
    """Of a router that is one process."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_queued = 0
        self.cells: Cells = defaultdict(float)
        self._by_class = [0] * MAX_CLASSES

    def enter(self, limit: int) -> bool:
        if self.num_open >= limit:
            return False
        self.num_open += 1
        return True

    def leave(self) -> None:
        self.num_open -= 1

    def set_queued(self, num_queued: int) -> None:
        self.num_queued = num_queued

    def set_class(self, rank: int, num_queued: int) -> None:
        self._by_class[rank] = num_queued

    def num_queued_of(self, rank: int) -> int:
        return self._by_class[rank]

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()


class SharedOccupancy:
    """Of one process among several; `index` is its place in the block. The descriptor stays the caller's, and open.

    Behind the counts the block holds `num_cells` numbers that all processes read and write under its lock: what rate limits have left.
    """

    def __init__(self, descriptor: int, index: int, num_processes: int, num_cells: int = 0) -> None:
        self._descriptor = descriptor
        self._num_counts = _NUMBERS * num_processes
        block = memoryview(mmap.mmap(descriptor, 8 * (self._num_counts + num_cells)))
        self._numbers = block[: 8 * self._num_counts].cast("q")
        self.cells: Cells = block[8 * self._num_counts :].cast("d")
        self._open_at = _NUMBERS * index
        self._queued_at = self._open_at + 1

    @property
    def num_open(self) -> int:
        return sum(self._numbers[::_NUMBERS])

    @property
    def num_queued(self) -> int:
        return sum(self._numbers[1::_NUMBERS])

    def enter(self, limit: int) -> bool:
        with self.locked():
            if self.num_open >= limit:
                return False
            self._numbers[self._open_at] += 1
            return True

    def leave(self) -> None:
        self._numbers[self._open_at] -= 1

    def set_queued(self, num_queued: int) -> None:
        self._numbers[self._queued_at] = num_queued

    def set_class(self, rank: int, num_queued: int) -> None:
        self._numbers[self._queued_at + 1 + rank] = num_queued

    def num_queued_of(self, rank: int) -> int:
        return sum(self._numbers[2 + rank : self._num_counts : _NUMBERS])

    def clear(self, index: int) -> None:
        """The process at that place has ended: nothing of it is in progress. For the supervisor."""
        for at in range(_NUMBERS * index, _NUMBERS * (index + 1)):
            self._numbers[at] = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process changes what all of them change."""
        is_locked = self._lock()
        try:
            yield
        finally:
            if is_locked:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        for _ in range(_MAX_TRIES):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            return True
        return False


def shared_block(num_processes: int, num_cells: int = 0) -> int:
    """Descriptor of a new block, all zero, for processes that inherit it."""
    descriptor = os.memfd_create("pd-serve-router")
    os.ftruncate(descriptor, 8 * (_NUMBERS * num_processes + num_cells))
    return descriptor
