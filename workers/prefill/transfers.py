"""What has been pushed for one attempt, and what is told of it once it has completed. Used by the transport thread only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pd_serve.ids import AttemptId
from pd_serve.kv.digest import KVDigest
from pd_serve.protocol.link import Sample
from pd_serve.protocol.notify import Completed
from pd_serve.protocol.traces import LayerTrace, Trace


@dataclass(slots=True)
class Transfer:
    """What has been pushed under one lease."""

    attempt_id: AttemptId
    pieces: list[Piece] = field(default_factory=list)
    service_s: float = 0.0
    pack_s: float = 0.0
    packed_nbytes: int = 0
    digest: KVDigest | None = None
    """Of the KV sent, where transfers are verified."""
    problem: str = ""
    """Why the attempt's KV cannot be complete at the target."""


@dataclass(slots=True)
class Piece:
    """One layer of one plan."""

    transfer: Transfer
    chunk: int
    layer: int
    written_at: float
    started_at: float
    nbytes: int
    ended_at: float | None = None
    """When the flush over it was answered."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The measures of one completed attempt."""

    samples: tuple[Sample, ...]
    trace: Trace


def overlap_ratio(ended: Iterable[tuple[float, int]], compute_ended_at: float) -> float:
    """Share of the bytes of (ended at, bytes) that had arrived when compute ended."""
    hidden = total = 0
    for ended_at, nbytes in ended:
        total += nbytes
        hidden += nbytes if ended_at <= compute_ended_at else 0
    return hidden / total if total else 0.0


def measure(transfer: Transfer, notice: Completed, compute_ended_at: float, now: float, lane: str) -> Finished:
    pieces = transfer.pieces
    # The attempt's own flush has been answered, so a piece whose flush has not has arrived as well.
    ends = [now if piece.ended_at is None else piece.ended_at for piece in pieces]
    origin = min(piece.written_at for piece in pieces)
    ratio = overlap_ratio(zip(ends, (piece.nbytes for piece in pieces), strict=True), compute_ended_at)
    trace = Trace(
        attempt_id=transfer.attempt_id,
        num_tokens=notice.num_tokens,
        compute_end_s=compute_ended_at - origin,
        flushed_s=now - origin,
        lane=lane,
        overlap_ratio=ratio,
        layers=tuple(
            LayerTrace(piece.chunk, piece.layer, piece.written_at - origin, piece.started_at - origin, end - origin, piece.nbytes)
            for piece, end in zip(pieces, ends, strict=True)
        ),
        origin_s=origin,
    )
    samples: tuple[Sample, ...] = (
        Sample("pd_serve_kv_transfer_bytes_total", float(sum(piece.nbytes for piece in pieces)), lane),
        Sample("pd_serve_kv_transfer_seconds", transfer.service_s),
        Sample("pd_serve_kv_overlap_ratio", ratio),
    )
    if transfer.packed_nbytes:
        samples += (
            Sample("pd_serve_kv_packed_bytes_total", float(transfer.packed_nbytes)),
            Sample("pd_serve_kv_pack_seconds", transfer.pack_s),
        )
    return Finished(samples, trace)
