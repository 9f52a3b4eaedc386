"""Who may write where on the checked data path, and the writer's own bounds check. Pure; shared by the implementations.

A write is refused for one of two kinds of reason, and the difference matters to the writer's flush: a STALE write (no window of that lease,
or another epoch) is one that nobody waits for any more, such as the tail of a cancelled attempt; a VIOLATION (live window, but the wrong
writer or bytes outside of it) means that a lease somebody waits for is not being filled as agreed.
"""

from __future__ import annotations

from enum import Enum

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import Epoch, LeaseId, PeerId
from pd_serve.transport.base import WriteWindow


class Verdict(Enum):
    ALLOWED = "allowed"
    STALE = "stale"
    VIOLATION = "violation"


class WindowTable:
    """Open write windows of one process, by lease."""

    def __init__(self) -> None:
        self._windows: dict[LeaseId, WriteWindow] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def open(self, window: WriteWindow) -> None:
        """A second window of a lease replaces the first."""
        starts, ends = _merge_touching(window.starts, window.ends)
        self._windows[window.lease_id] = msgspec.structs.replace(window, starts=starts, ends=ends)

    def close(self, lease_id: LeaseId) -> WriteWindow | None:
        return self._windows.pop(lease_id, None)

    def check(self, writer: PeerId, lease_id: LeaseId, epoch: Epoch, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> Verdict:
        """Whether `writer` may write every one of the ranges [offset, offset + length), bytes of the pool, offsets and lengths [n]."""
        window = self._windows.get(lease_id)
        if window is None or window.epoch != epoch:
            return Verdict.STALE
        if writer not in window.writers:
            return Verdict.VIOLATION
        if len(offsets) == 0:
            return Verdict.ALLOWED
        if len(window.starts) == 0:
            return Verdict.VIOLATION
        index = np.searchsorted(window.starts, offsets, side="right") - 1
        # Lengths are compared with what is left of the range, never added to an offset: a huge length must not wrap around.
        room = window.ends[np.maximum(index, 0)] - offsets
        inside = (index >= 0) & (lengths >= 0) & (lengths <= room)
        return Verdict.ALLOWED if bool(inside.all()) else Verdict.VIOLATION


def check_bounds(ops: NDArray[np.int64], local_nbytes: int, remote_nbytes: int) -> int:
    """Total bytes of a batch's ops ([n, 3]: local offset, remote offset, length).

    Raises OutOfBoundsError for an op outside the local or the remote pool: a wild put would end the peer's process.
    """
    if ops.ndim != 2 or ops.shape[1] != 3 or ops.dtype != np.int64:
        raise OutOfBoundsError(f"ops of shape {ops.shape} and type {ops.dtype}, not int64 [n, 3]")
    if ops.shape[0] == 0:
        return 0
    if int(ops.min()) < 0:
        raise OutOfBoundsError("negative offset or length")
    lengths = ops[:, 2]
    top_local, top_remote, longest = ops.max(axis=0).tolist()
    if top_local + longest <= local_nbytes and top_remote + longest <= remote_nbytes:
        return int(lengths.sum())  # the rule, and nothing in it can overflow: these are Python's integers
    # `offset > size - length` instead of `offset + length > size`: no overflow with huge values.
    for column, size, side in ((0, local_nbytes, "local"), (1, remote_nbytes, "remote")):
        outside = (lengths > size) | (ops[:, column] > size - np.minimum(lengths, size))
        if bool(outside.any()):
            at = int(np.argmax(outside))
            raise OutOfBoundsError(f"{lengths[at]} bytes at {side} offset {ops[at, column]} of a pool of {size} bytes")
    return int(lengths.sum())


def _merge_touching(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join ranges that touch, so that one coalesced write may span them."""
    if len(starts) < 2:
        return starts, ends
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last]
