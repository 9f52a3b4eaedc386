"""What a worker tells every router of its prefix cache: which blocks can be found there, by the digests of kv/prefix_chain.py.

    the link is up, or CacheSnapshot came -> the published digests, in parts    CacheEvents(seq, stored, part 0 .. num_parts - 1)
    then, with the rhythm of Load         -> what has changed since             CacheEvents(seq + 1, stored, removed), ...

`seq` counts the changes of one incarnation, the same on every link. A snapshot begins with what stands at `seq`; each further part lists
what stands when it is sent, and changes may come between two parts: all parts and all changes since the first, taken in as they come,
give the published set. Part and change that do not follow what came before mean that something was missed: the router forgets what it knew
and sends CacheSnapshot. How often it may do that matters little: a snapshot, too, is sent with the rhythm of Load.
"""

from __future__ import annotations

from pd_serve.kv.prefix_chain import SHORT_NBYTES
from pd_serve.protocol.frame import Frame

MAX_DIGESTS = 4096
"""In one frame, stored or removed: 32 KiB, and no long turn of the router's event loop."""


class CacheSnapshot(Frame, frozen=True, tag="cache_snapshot"):
    """Router -> worker: something was missed. Answered by a snapshot."""


class CacheEvents(Frame, frozen=True, tag="cache_events"):
    """Worker -> router. One that means nothing does not decode."""

    seq: int
    stored: bytes
    """Short digests, one after the other: of blocks that can be found now ..."""
    removed: bytes = b""
    """... and of those that cannot any more. None is in both."""
    part: int = 0
    num_parts: int = 0
    """Of a snapshot; 0: these are changes."""

    @property
    def is_snapshot(self) -> bool:
        return self.num_parts > 0

    def __post_init__(self) -> None:
        for digests in (self.stored, self.removed):
            if len(digests) % SHORT_NBYTES or len(digests) > MAX_DIGESTS * SHORT_NBYTES:
                raise ValueError(f"{len(digests)} bytes of digests")
        if min(self.seq, self.part, self.num_parts) < 0 or self.part >= max(1, self.num_parts):
            raise ValueError(f"part {self.part} of {self.num_parts} at {self.seq}")
        if self.is_snapshot and self.removed:
            raise ValueError("a snapshot that removes")
