"""Writing into a peer's memory that this process sees as its own: shared memory, which UCX maps with the peer's key.

UCX's put there is a copy made inside the call, and calling it from Python costs as much again as copying a block. Here all pieces of a
batch are one call (native/ranges.py). The flush stays UCX's: it puts a fence behind the stores, and what counts as delivered is for
one_sided.py to say.

A page that is written for the first time through a mapping costs several times its copy, so a mapping is populated before it is needed
(`populate`), in small parts: the owner thread has other things to do.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from pd_serve.transport.native.ranges import range_copy

POPULATE_NBYTES = 2 * 1024 * 1024
"""At a time: about a quarter of a millisecond."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: make the pages writable at once, leaving what they hold."""


class MappedMemory:
    """The peer's memory beside this process's own. Must not be used after the key that it was mapped with is closed."""

    __slots__ = ("_copy", "_num_populated", "_source_address", "_target_address", "_target_nbytes")

    def __init__(self, source_address: int, source_nbytes: int, target_address: int, target_nbytes: int) -> None:
        self._source_address = source_address
        self._target_address = target_address
        self._target_nbytes = target_nbytes
        self._num_populated = 0
        self._copy = range_copy()

    def write(self, ops: NDArray[np.int64]) -> None:
        """Copy the pieces, as in Pieces. Precondition: all lie inside (check_bounds)."""
        self._copy(self._target_address, self._source_address, ops)

    @property
    def is_populated(self) -> bool:
        return self._num_populated >= self._target_nbytes

    def populate(self) -> None:
        """The next POPULATE_NBYTES of the peer's memory."""
        start = self._num_populated
        nbytes = min(POPULATE_NBYTES, self._target_nbytes - start)
        self._num_populated += nbytes
        if not populate(self._target_address + start, nbytes):
            self._num_populated = self._target_nbytes


def populate(address: int, nbytes: int) -> bool:
    """Make all pages of a shared mapping writable without a fault. False where the system cannot: they fault one by one, then."""
    start = address & -mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    result: int = libc.madvise(start, address + nbytes - start, _MADV_POPULATE_WRITE)
    return result == 0
