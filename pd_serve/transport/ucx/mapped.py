"""Writing into a peer's memory that this process sees as its own: shared memory, which UCX maps with the peer's key.

UCX's put there is a copy made inside the call, and calling it from Python costs as much again as copying a block. Here all pieces of a
batch are one call (native/ranges.py). The flush stays UCX's: it puts a fence behind the stores, and what counts as delivered is for
one_sided.py to say.

A page that is written for the first time through a mapping costs several times its copy, so a mapping is populated before it is needed,
in small parts: the owner thread has other things to do. Where the peer's memory is in huge pages (pages.py), UCX has mapped it wherever
there was room, so it is mapped here once more, where they can be used.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pd_serve.transport.native.ranges import range_copy
from pd_serve.transport.ucx.pages import HUGE_NBYTES, map_again, populate, release

POPULATE_NBYTES = 2 * 1024 * 1024
"""At a time: about a quarter of a millisecond."""


class MappedMemory:
    """The peer's memory beside this process's own. Owned by the writer, who closes it; not used after the key it came from is closed."""

    __slots__ = ("_again", "_copy", "_num_populated", "_source_address", "_target_address", "_target_nbytes")

    def __init__(self, source_address: int, source_nbytes: int, target_address: int, target_nbytes: int) -> None:
        self._source_address = source_address
        self._again = map_again(target_address, target_nbytes) if target_nbytes >= HUGE_NBYTES else None
        self._target_address = target_address if self._again is None else self._again
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

    def close(self) -> None:
        """Idempotent."""
        if self._again is not None:
            release(self._again, self._target_nbytes)
            self._again = None
