"""A queue into one thread that sleeps in select: any thread puts, the owner is woken through a descriptor and takes everything at once."""

from __future__ import annotations

import os
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Create and close on the owner thread; `put` from any thread, in order per thread, never blocking. Items are frozen."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """Readable while something has been put and not been taken."""
        return self._fd

    def put(self, item: T) -> None:
        """After close the item is dropped: its owner has gone."""
        self._items.append(item)
        if not self._closed:
            os.eventfd_write(self._fd, 1)

    def take_all(self) -> list[T]:
        """Everything put so far, oldest first; empty when there is nothing."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return []
        # An item put after the read wakes the owner again; one taken here already only makes that wake-up empty.
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Idempotent. Precondition: every thread that puts has ended, or may lose what it puts."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
