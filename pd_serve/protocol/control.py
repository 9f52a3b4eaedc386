"""Rare control calls over plain HTTP (JSON): worker registration at a router, status, drain, role. Unknown fields are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pd_serve.addresses import split_address
from pd_serve.errors import ProtocolError
from pd_serve.protocol.link import Role

REGISTER_PATH = "/internal/v1/workers"
STATUS_PATH = "/internal/v1/status"
REQUESTS_PATH = "/internal/v1/requests"
LINK_PATH = "/link"
WORKER_DRAIN_PATH = "/control/drain"
WORKER_ROLE_PATH = "/control/role"
WORKER_TRACES_PATH = "/control/traces"
WORKER_STATUS_PATH = "/control/status"


MAX_DRAIN_S = 7 * 24 * 3600.0


class ControlModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RegisterWorker(ControlModel):
    """Worker -> router, every heartbeat: also how a restarted router learns of its workers. Idempotent."""

    worker_id: str = Field(min_length=1, max_length=128, pattern="^[^#]*$", description="without `#`, which stands before a rank's number")
    incarnation: int = Field(ge=0, lt=2**63)
    address: str = Field(description="http(s)://host:port at which the router reaches this worker's front", max_length=256)
    role: Role
    ready: bool

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        try:
            split_address(value)
        except ProtocolError as error:
            raise ValueError(error.message) from None
        return value


class Registered(ControlModel):
    router_id: str
    heartbeat_s: float
    linked: bool = Field(description="the router holds a live link to this incarnation")


class ControlErrorBody(ControlModel):
    message: str
    code: str


class ControlError(ControlModel):
    """What a worker's front answers to a control call that it refuses."""

    error: ControlErrorBody


class DrainRequest(ControlModel):
    deadline_s: float = Field(default=30.0, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False)


class RoleRequest(ControlModel):
    role: Role
    deadline_s: float = Field(
        default=30.0, ge=0, le=MAX_DRAIN_S, allow_inf_nan=False, description="for what runs in the old role; then it is moved"
    )


class BlockStatus(ControlModel):
    total: int
    free: int
    cached: int
    leased: int
    quarantined: int


class PeerLaneStatus(ControlModel):
    peer: str
    joined: bool
    lane: str
    one_sided: bool
    bandwidth_bytes_per_s: float
    detail: str


class BreakerStatus(ControlModel):
    leg: str = Field(description="prefill or decode")
    state: str = Field(description="closed, half_open or open")
    failures: int = Field(description="in a row")


class WorkerStatus(ControlModel):
    """One element of `pd-serve status --json`; names are relied on by outside scripts."""

    id: str
    role: Role
    incarnation: int
    address: str
    pid: int
    rank_pids: tuple[int, ...]
    ready: bool
    draining: bool
    blocks: BlockStatus
    leases: int
    running: int
    waiting: int
    prefill_queue_tokens: int
    peers: tuple[PeerLaneStatus, ...] = ()
    breakers: tuple[BreakerStatus, ...] = Field(default=(), description="of the legs that have failed lately; from a router only")


class AttemptTimeline(ControlModel):
    """One placement of a choice. Times are seconds since the choice arrived."""

    prefill: str | None = Field(description="worker that computed the prompt; null: the one that decodes")
    decode: str
    began_s: float
    left_s: float | None = Field(description="null: still there")
    left_because: str = Field(description="reason of the move, as in pd_serve_moves_total, or no_capacity; empty: it was not moved")
    output_tokens: int = Field(description="tokens of the choice, over all attempts, when this one ended")
    attempt_id: int = Field(default=0, description="by which the workers' traces name it")
    reserved_s: float | None = Field(default=None, description="decode's answer that it has room; null: none came")
    prefilled_s: float | None = Field(default=None, description="prefill's word that all KV was sent; null: none came")
    first_token_s: float | None = Field(default=None, description="the first token of the choice; null: another attempt brought it")


class RequestTimeline(ControlModel):
    """One choice of a recent request and every place it had."""

    choice: int = Field(description="the number by which the router's log names it")
    prompt_tokens: int
    attempts: tuple[AttemptTimeline, ...]
    received_s: float = Field(default=0.0, description="the head of its HTTP request was here: not positive")
    arrived_at_s: float = Field(default=0.0, description="moment of arrival, on the monotonic clock of the router's host")
    ended_s: float | None
    outcome: str = Field(description="stop, length, an error code, or cancelled (by the client, or by a stop string); empty: not ended")
    request_id: str = Field(default="", description="of the client's request: x-request-id as it gave it, or as it was told")
    response_id: str = Field(default="", description="the `id` of the answer, which all its choices share")


class RecentRequests(ControlModel):
    requests: tuple[RequestTimeline, ...] = Field(description="newest first")


class PairStatus(ControlModel):
    """Two workers, of which one may compute prompts for the other."""

    prefill: str
    decode: str
    compatible: bool
    reason: str = Field(description="what differs, with both values; empty: nothing that matters")
    joined: bool = Field(description="each has joined the other: requests are placed on such pairs")
    lane: str = Field(description="what the prefill worker writes over; empty: not joined")
    conversion: str = Field(description="what a transfer changes, as in `block 16->64, bf16->fp8`; none: KV goes as it lies")


class RouterStatus(ControlModel):
    router_id: str
    model: str | None
    open_requests: int
    queued_requests: int
    workers: tuple[WorkerStatus, ...]
    pairs: tuple[PairStatus, ...] = ()
