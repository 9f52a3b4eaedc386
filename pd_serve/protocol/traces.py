"""When recent requests passed through a worker: from a rank to its front, and from there as JSON (GET /control/traces). Never to a router.

Moments are on the monotonic clock of the host: comparable between processes of one host, and nowhere else.
"""

from __future__ import annotations

from pd_serve.ids import AttemptId
from pd_serve.protocol.frame import Frame


class LayerTrace(Frame, frozen=True, array_like=True, tag="layer_trace"):
    """Seconds since the first layer's KV was written, all on the prefill process's clock."""

    chunk: int
    layer: int
    kv_written_s: float
    """The layer's KV of this chunk is in the pool; its attention and MLP follow."""
    push_start_s: float
    push_end_s: float
    nbytes: int


class Trace(Frame, frozen=True, tag="trace"):
    """How one attempt's transfer ran beside its compute."""

    attempt_id: AttemptId
    num_tokens: int
    compute_end_s: float
    flushed_s: float
    lane: str
    overlap_ratio: float
    """Share of KV bytes whose put had returned before the last layer's compute ended."""
    layers: tuple[LayerTrace, ...]
    origin_s: float = 0.0
    """The moment at which the first layer's KV was written."""


class AttemptTrace(Frame, frozen=True, tag="attempt_trace"):
    """One leg of an attempt, up to its first token. Moments; None: it did not come to that."""

    attempt_id: AttemptId
    is_prefill_leg: bool
    received_s: float
    """Its Open, or its Prefill, was here."""
    reserved_s: float | None = None
    """Its Reserved went out: blocks are held, and the window is open."""
    record_s: float | None = None
    """The completion record was accepted, and the first token went out."""
    step_started_s: float | None = None
    """The first step that computed some of it began ..."""
    step_ended_s: float | None = None
    """... and the first that sampled a token for it ended."""


class Traces(Frame, frozen=True, tag="traces"):
    traces: tuple[Trace, ...]
    attempts: tuple[AttemptTrace, ...] = ()
