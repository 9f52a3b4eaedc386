"""What the two data paths have in common: how a peer's pool is written. one_sided.py and checked.py implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import Epoch, LeaseId

MAX_PIECE_NBYTES = 256 * 1024
"""Of one put and of one message: longer writes are cut. A put into shared memory of this size takes tens of microseconds."""


class Completion(NamedTuple):
    """A flush has ended."""

    token: int
    ok: bool
    detail: str


class Pieces(NamedTuple):
    """Writes of one lease."""

    lease_id: LeaseId
    epoch: Epoch
    ops: NDArray[np.int64]
    """[n, 3], contiguous, changed by nobody: offset in the local pool, offset in the peer's pool, length in bytes."""

    def columns(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Local offsets, remote offsets, lengths."""
        local, remote, sizes = self.ops.T.tolist()
        return local, remote, sizes


class Writer(Protocol):
    """Writes to one peer, in order. Never blocks; what cannot be issued now waits in a queue that `pump` works off."""

    num_bytes: int
    """Issued so far."""
    num_writes: int

    def write(self, pieces: Pieces) -> None: ...

    def probe(self, nbytes: int) -> None:
        """Write that many bytes of anything into the peer's scratch area."""
        ...

    def flush(self, token: int) -> None:
        """Ends in one Completion."""
        ...

    def pump(self) -> bool:
        """Issue and collect what can be. True when something moved."""
        ...

    def take_completions(self) -> list[Completion]: ...

    @property
    def is_pending(self) -> bool:
        """Something is queued or under way."""
        ...

    def abort(self, detail: str) -> None:
        """Issue nothing more; every pending flush completes with ok=False."""
        ...

    def close(self) -> None:
        """Release keys. Idempotent."""
        ...


def whole(lease_id: LeaseId, nbytes: int) -> Pieces:
    """The first `nbytes` of one memory into the first of another."""
    return Pieces(lease_id, Epoch(0), np.array([[0, 0, nbytes]], np.int64))


def cut(pieces: Pieces, limit: int = MAX_PIECE_NBYTES) -> Pieces:
    """The same bytes in pieces of at most `limit`."""
    sizes = pieces.ops[:, 2]
    if len(sizes) == 0 or int(sizes.max()) <= limit:
        return pieces
    counts = -(-sizes // limit)
    ops = np.repeat(pieces.ops, counts, axis=0)
    start = (np.arange(len(ops)) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
    ops[:, :2] += start[:, None]
    ops[:, 2] = np.minimum(limit, ops[:, 2] - start)
    return pieces._replace(ops=ops)
