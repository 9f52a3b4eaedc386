"""What moves KV bytes and records between worker processes. One implementation per file beside this one.

A Transport is single-threaded and never blocks: the transport thread (workers/) owns it, calls every method, calls `progress()` while
`busy()` and sleeps on `wait_fds()` (after `arm()`) otherwise. Nothing here knows of requests; a lease is two numbers.

Two data paths, chosen per peer and told in PeerJoined:
  one-sided   puts straight into the peer's registered pool (shared memory that the transport allocated, RDMA). Nobody on the other side
              can refuse them, so the writer must be trusted to stop: Abandon / Quiesced, or its death (`PeerLost.fenced`).
  checked     the same bytes as messages whose handler, on the target, looks up the write window (lease, epoch, writer, bounds) and copies.
              A message without a live window is dropped and counted; closing the window is a complete fence.

What every implementation guarantees (tests/contract):
  visibility  after Flushed(ok=True) every byte of the batches before it is in the peer's memory
  order       a notice sent after Flushed is handled after those bytes are visible
  delivery    ok=True only when the flush succeeded AND the peer had not failed by then
  bounds      a write outside the local or the remote region raises OutOfBoundsError before anything is sent
  join        nothing is written to a peer, and no notice of it is delivered, before a hello that both answered (incarnation, keyed digest)
  end         close() and remove_peer() are idempotent; no event of a removed peer follows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import Epoch, LeaseId, PeerId


class Region(msgspec.Struct, frozen=True):
    """Memory that this process may be a source or a target of writes in."""

    region_id: int
    address: int
    nbytes: int
    buffer: memoryview | None
    """Host memory the transport allocated itself (None where it only registered the caller's)."""


class WriteWindow(msgspec.Struct, frozen=True):
    """Permission to write into some ranges of the pool, checked on the `checked` data path."""

    lease_id: LeaseId
    epoch: Epoch
    writer: PeerId
    starts: NDArray[np.int64]
    """Sorted, disjoint byte ranges [start, end) of the pool region."""
    ends: NDArray[np.int64]
    other_writers: tuple[PeerId, ...] = ()
    """Ranks of the same worker that write other heads of the same tokens."""

    @property
    def writers(self) -> tuple[PeerId, ...]:
        return (self.writer, *self.other_writers)


class WriteBatch(msgspec.Struct, frozen=True):
    """Writes of one lease to one peer, issued together."""

    peer: PeerId
    lease_id: LeaseId
    epoch: Epoch
    ops: NDArray[np.int64]
    """[n, 3]: byte offset in the local pool, byte offset in the peer's pool, length in bytes. Coalesced by the caller."""


# ---- events


class PeerJoined(msgspec.Struct, frozen=True):
    peer: PeerId
    lane: str
    one_sided: bool
    bandwidth: float
    """Bytes per second of the probe writes made at join."""
    round_trip_s: float


class PeerRefused(msgspec.Struct, frozen=True):
    """The join failed: bad digest, wrong incarnation, incompatible library, unreachable, or slower than `min_bandwidth`."""

    peer: PeerId
    detail: str


class PeerLost(msgspec.Struct, frozen=True):
    """A joined peer is gone. Its pending flushes have failed before this event."""

    peer: PeerId
    detail: str
    fenced: bool
    """No write of this peer can land any more (its process is dead, or its path is checked).
    When False a `PeerFenced` follows once known."""


class PeerFenced(msgspec.Struct, frozen=True):
    """A lost, not yet fenced peer can write no more."""

    peer: PeerId


class Flushed(msgspec.Struct, frozen=True):
    token: int
    ok: bool
    detail: str = ""


class NoticeReceived(msgspec.Struct, frozen=True):
    peer: PeerId
    payload: bytes


TransportEvent = PeerJoined | PeerRefused | PeerLost | PeerFenced | Flushed | NoticeReceived
EventSink = Callable[[TransportEvent], None]


class TransportCounters(msgspec.Struct):
    """Totals since start, read by the owner thread."""

    bytes_written: int = 0
    writes: int = 0
    refused_writes: int = 0
    """Incoming messages without a live window (stale, out of bounds, stranger)."""
    refused_hellos: int = 0


class TransportSettings(msgspec.Struct, frozen=True):
    """What an implementation is created with."""

    self_id: PeerId
    secret: bytes
    """Keys the digest of hellos; empty only on loopback addresses."""
    host: str
    """Interface address that network lanes bind to and advertise."""
    host_id: str
    """Equal for processes that can share memory and see each other's pids (boot id + IPC and pid namespaces)."""
    lanes: str = "auto"
    """`auto`, `shm`, `tcp`, `rdma`: restricts which lanes may be used."""
    min_bandwidth: float = 0.0
    """Bytes per second below which a join is refused; 0 accepts any."""
    join_timeout_s: float = 5.0
    probe_nbytes: int = 1 << 20
    binding: str = "auto"
    """Binding of UCX, as in TransportConfig; other transports have none."""


class Transport(Protocol):
    """Create (on the owner thread) -> allocate or register the pool -> export_metadata -> add_peer / write / flush / notify -> close."""

    name: str

    def allocate_pool(self, nbytes: int) -> Region:
        """Host memory that peers will write into, zeroed, in whatever kind the best lane of this host needs. Call once."""
        ...

    def register_pool(self, address: int, nbytes: int, device: str) -> Region:
        """Register the caller's memory (`cpu`, `cuda:0`) instead. It must outlive the transport. Call once."""
        ...

    def export_metadata(self) -> bytes:
        """For PeerInfo.transport_metadata: what a peer needs to reach this one. Holds no secret."""
        ...

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Begin to join; ends in PeerJoined or PeerRefused within join_timeout_s. Both sides call it; a known peer is left alone.

        A PeerId with a known worker id and another incarnation is another peer; remove the old one first.
        """
        ...

    def remove_peer(self, peer: PeerId) -> None: ...

    def open_window(self, window: WriteWindow) -> None: ...

    def close_window(self, lease_id: LeaseId) -> bool:
        """After this returns no checked write of the lease can land. True when that is a complete fence for all writers (checked path)."""
        ...

    def write(self, batch: WriteBatch) -> None:
        """Issue the writes. Raises OutOfBoundsError; a lost or unknown peer shows in the next flush."""
        ...

    def flush(self, peer: PeerId, token: int) -> None:
        """Ends in Flushed(token), exactly once, also when the peer is lost or unknown (ok=False)."""
        ...

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Best effort, at most MAX_NOTICE_NBYTES; in order per peer. A peer that is lost takes it silently."""
        ...

    def hard_fence(self, peer: PeerId) -> bool:
        """Make a silent local peer unable to write by ending its process (pidfd, SIGKILL); PeerLost or PeerFenced follows.

        False if impossible.
        """
        ...

    def progress(self) -> bool:
        """Advance everything once; events go to the sink. True when something happened."""
        ...

    def busy(self) -> bool:
        """Something is outstanding that needs progress without sleeping."""
        ...

    def arm(self) -> bool:
        """Prepare to sleep on wait_fds(). False: something has arrived, call progress() again."""
        ...

    def wait_fds(self) -> tuple[int, ...]: ...

    def next_deadline(self) -> float | None:
        """Monotonic time by which progress() must be called again even if no descriptor is ready."""
        ...

    def lanes(self) -> tuple[str, ...]:
        """Lanes this process can offer, best first, for `doctor` and logs."""
        ...

    def counters(self) -> TransportCounters: ...

    def close(self) -> None: ...
