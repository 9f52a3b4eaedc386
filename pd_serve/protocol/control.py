"""Rare control calls over plain HTTP (JSON): worker registration at a router, status, drain, role. Unknown fields are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from pd_serve.protocol.link import Role

REGISTER_PATH = "/internal/v1/workers"
STATUS_PATH = "/internal/v1/status"
LINK_PATH = "/link"
WORKER_DRAIN_PATH = "/control/drain"
WORKER_ROLE_PATH = "/control/role"
WORKER_TRACES_PATH = "/control/traces"
WORKER_STATUS_PATH = "/control/status"


class ControlModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RegisterWorker(ControlModel):
    """Worker -> router, every heartbeat: also how a restarted router learns of its workers. Idempotent."""

    worker_id: str = Field(min_length=1, max_length=128)
    incarnation: int
    address: str = Field(description="http://host:port at which the router reaches this worker's front", max_length=256)
    role: Role
    ready: bool


class Registered(ControlModel):
    router_id: str
    heartbeat_s: float
    linked: bool = Field(description="the router holds a live link to this incarnation")


class DrainRequest(ControlModel):
    deadline_s: float = Field(default=30.0, ge=0)


class RoleRequest(ControlModel):
    role: Role


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


class RouterStatus(ControlModel):
    router_id: str
    model: str | None
    open_requests: int
    queued_requests: int
    workers: tuple[WorkerStatus, ...]
