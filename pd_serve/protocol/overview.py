"""What the router tells the live page (router/ui): the cluster at a glance, and one request's way. JSON, read only; made when asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pd_serve.protocol.control import ControlModel, PairStatus, WorkerStatus

OVERVIEW_PATH = "/internal/v1/overview"
WATERFALL_PATH = "/internal/v1/requests/{name}/waterfall"

Place = Literal["router", "prefill", "decode", "transfer"]


class HistogramView(ControlModel):
    """Of all processes of the router, since they started."""

    bounds: tuple[float, ...] = Field(description="upper bounds of the buckets in seconds, the last bucket's left out: it has none")
    counts: tuple[int, ...] = Field(description="of each bucket alone, one more than bounds")
    sum: float


class RequestRow(ControlModel):
    """One choice of a recent request."""

    id: str = Field(description="names it in the path of its waterfall")
    choice: int
    request_id: str = Field(description="x-request-id of its client; empty: it gave none")
    response_id: str
    prompt_tokens: int
    output_tokens: int = Field(description="0 while it is in progress")
    prefill: str | None = Field(description="where it was last; null: where it decodes")
    decode: str | None = Field(description="null: it has not been placed")
    moves: int
    age_s: float = Field(description="seconds since it arrived")
    queue_s: float | None = Field(description="from its arrival to its first placement")
    ttft_s: float | None
    total_s: float | None = Field(description="null: in progress")
    outcome: str = Field(description="as in the router's timeline; empty: in progress")


class Overview(ControlModel):
    router_id: str
    model: str
    not_ready: str = Field(description="why no request could be served now; empty: one could")
    open_requests: int
    queued_requests: int
    requests_ended: int
    moves: int
    rejections: int
    prompt_tokens: int
    generated_tokens: int
    ttft: HistogramView
    itl: HistogramView
    tpot: HistogramView
    e2e: HistogramView
    workers: tuple[WorkerStatus, ...]
    pairs: tuple[PairStatus, ...]
    requests: tuple[RequestRow, ...] = Field(description="newest first")


class Span(ControlModel):
    """Seconds since the choice arrived."""

    name: str
    place: Place
    begin_s: float
    end_s: float
    is_tail: bool = Field(default=False, description="what follows the first token, which is as long as the answer")


class LayerSpan(ControlModel):
    """One layer of one chunk of the prompt on the prefill worker. Seconds since the choice arrived."""

    chunk: int
    layer: int
    compute_begin_s: float = Field(description="its KV is written; attention and MLP follow")
    compute_end_s: float = Field(description="the KV of the next layer is written")
    push_begin_s: float
    push_end_s: float
    nbytes: int


class LegClock(ControlModel):
    """What is known of a worker's part, and how its moments were brought onto the router's clock."""

    worker: str
    is_known: bool
    detail: str = Field(description="why nothing is known")
    is_same_clock: bool = Field(default=False, description="router and worker run on one host: moments compare as they are")
    uncertainty_s: float | None = Field(
        default=None, description="on another host: its moments may all be off by this much either way; null: nothing bounds it"
    )


class AttemptWaterfall(ControlModel):
    """One placement."""

    attempt_id: str = Field(description="decimal; beyond what a JSON number holds exactly")
    prefill: str | None
    decode: str
    left_because: str
    legs: tuple[LegClock, ...]
    spans: tuple[Span, ...]
    layers: tuple[LayerSpan, ...] = ()
    lane: str = ""
    kv_nbytes: int = 0
    overlap_ratio: float | None = Field(default=None, description="null: no transfer is known of")
    compute_end_s: float | None = None
    flushed_s: float | None = None


class Waterfall(ControlModel):
    choice: int
    request_id: str
    response_id: str
    prompt_tokens: int
    ended_s: float | None
    outcome: str
    attempts: tuple[AttemptWaterfall, ...]
