"""What the two data paths have in common: how a peer's pool is written. one_sided.py and checked.py implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pd_serve.ids import Epoch, LeaseId

MAX_PIECE_NBYTES = 256 * 1024
"""Longer writes are cut: a shared-memory put of this size holds the owner thread for about 20 microseconds."""
LOCKED_NBYTES = 64 * 1024
"""A copy made inside a call keeps the interpreter's lock up to this size. Beside a thread that computes in Python, 200 copies of 6 KiB took
0.2 ms at the median either way, but one batch in ten waited 10 ms (two switch intervals) for the lock when each copy gave it away."""


class Completion(NamedTuple):
    """A flush has ended."""

    token: int
    ok: bool
    detail: str


class Pieces(NamedTuple):
    """Writes of one lease: parallel columns of offsets in the local pool, offsets in the peer's pool, and lengths in bytes."""

    lease_id: LeaseId
    epoch: Epoch
    local: Sequence[int]
    remote: Sequence[int]
    sizes: Sequence[int]


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


def cut(pieces: Pieces, limit: int = MAX_PIECE_NBYTES) -> Pieces:
    """The same bytes in pieces of at most `limit`."""
    if not pieces.sizes or max(pieces.sizes) <= limit:
        return pieces
    local: list[int] = []
    remote: list[int] = []
    sizes: list[int] = []
    for source, target, nbytes in zip(pieces.local, pieces.remote, pieces.sizes, strict=True):
        for start in range(0, nbytes, limit):
            local.append(source + start)
            remote.append(target + start)
            sizes.append(min(limit, nbytes - start))
    return Pieces(pieces.lease_id, pieces.epoch, local, remote, sizes)
