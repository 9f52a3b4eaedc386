"""Write windows: which ranges of the pool which peer may write under which lease, asked for every incoming data message.

A range that is not wholly inside one window, or a lease, epoch or writer that does not match, is refused. Closing a window is complete:
the check and the copy happen in the same call, so nothing can land afterwards.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import Epoch, LeaseId, PeerId
from pd_serve.transport.base import WriteWindow


class OpenWindow:
    """One lease's ranges, touching ones merged."""

    __slots__ = ("_ends", "_starts", "epoch", "writer")

    def __init__(self, window: WriteWindow, pool_nbytes: int) -> None:
        """Raises OutOfBoundsError when the ranges are not sorted, disjoint and inside the pool."""
        starts, ends = np.asarray(window.starts, np.int64), np.asarray(window.ends, np.int64)
        if starts.shape != ends.shape or starts.ndim != 1:
            raise OutOfBoundsError(f"window of lease {window.lease_id}: {starts.shape} starts, {ends.shape} ends")
        if starts.size and not (starts[0] >= 0 and ends[-1] <= pool_nbytes and (starts < ends).all() and (ends[:-1] <= starts[1:]).all()):
            raise OutOfBoundsError(f"window of lease {window.lease_id}: ranges are not sorted, disjoint and inside the pool")
        is_first = np.ones(starts.size, dtype=bool)
        is_first[1:] = ends[:-1] < starts[1:]
        is_last = np.ones(starts.size, dtype=bool)
        is_last[:-1] = is_first[1:]
        self._starts: list[int] = starts[is_first].tolist()
        self._ends: list[int] = ends[is_last].tolist()
        self.epoch = window.epoch
        self.writer = window.writer

    def contains(self, offset: int, nbytes: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset + nbytes <= self._ends[index]


class WindowTable:
    """The live windows of this process."""

    def __init__(self) -> None:
        self._windows: dict[LeaseId, OpenWindow] = {}

    def open(self, window: WriteWindow, pool_nbytes: int) -> None:
        """Replaces an earlier window of the same lease. Raises OutOfBoundsError."""
        self._windows[window.lease_id] = OpenWindow(window, pool_nbytes)

    def close(self, lease_id: LeaseId) -> PeerId | None:
        """The writer that had the window; None when there is none."""
        window = self._windows.pop(lease_id, None)
        return window.writer if window is not None else None

    def find(self, writer: PeerId, lease_id: LeaseId, epoch: Epoch) -> OpenWindow | None:
        """The window under which `writer` may write now."""
        window = self._windows.get(lease_id)
        if window is None or window.epoch != epoch or window.writer != writer:
            return None
        return window

    def __len__(self) -> int:
        return len(self._windows)
