"""What a front knows of its worker: identity, the rank's latest report, health and readiness. Pure; the clock is passed in.

Health answers "is the engine moving": a rank that has reported before and then misses five reports is frozen. Loading a model takes long
and is healthy. Readiness answers "can this worker generate now".
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.clock import Clock
from pd_serve.ids import Incarnation, WorkerId
from pd_serve.protocol.control import BlockStatus, PeerLaneStatus, RegisterWorker, WorkerStatus
from pd_serve.protocol.link import BlockCounts, Load, PeerState, Report, Role, Welcome

MISSED_REPORTS = 3


@dataclass(frozen=True, slots=True)
class Identity:
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    address: str
    """http://host:port at which others reach this front."""
    pid: int


class FrontView:
    """Fed by the front's loops; read by its routes and its registrations."""

    def __init__(self, identity: Identity, report_interval_s: float, clock: Clock) -> None:
        self.identity = identity
        self._report_interval_s = report_interval_s
        self._clock = clock
        self.welcome: Welcome | None = None
        self.rank_pid = 0
        self.draining = False
        self.load = _no_load(identity.role)
        self.peers: tuple[PeerState, ...] = ()
        self.idle = False
        self._last_report: float | None = None

    def take_welcome(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self._last_report = self._clock.now()

    def take_report(self, report: Report) -> bool:
        """True when what routers are told at registration has changed."""
        changed = report.load.role is not self.load.role or report.load.draining != self.load.draining
        self.load = report.load
        self.peers = report.peers
        self.idle = report.idle
        self._last_report = self._clock.now()
        return changed

    @property
    def drained(self) -> bool:
        """The rank has heard of the drain and holds nothing any more."""
        return self.load.draining and self.idle

    @property
    def silence_s(self) -> float:
        """Seconds since the last report; 0 before the first sign of life."""
        return 0.0 if self._last_report is None else self._clock.now() - self._last_report

    @property
    def unhealthy(self) -> str:
        """Why, in one line; empty when all is well."""
        silence_s = self.silence_s
        if silence_s > MISSED_REPORTS * self._report_interval_s:
            return f"the engine has not reported for {silence_s:.1f} s"
        return ""

    @property
    def not_ready(self) -> str:
        """Why, in one line; empty when it can generate."""
        if self.welcome is None:
            return "the model is loading"
        if self.draining or self.load.draining:
            return "draining"
        return self.unhealthy

    def registration(self) -> RegisterWorker:
        identity = self.identity
        return RegisterWorker(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            address=identity.address,
            role=self.load.role,
            ready=not self.not_ready,
        )

    def status(self) -> WorkerStatus:
        identity, load = self.identity, self.load
        return WorkerStatus(
            id=identity.worker_id,
            role=load.role,
            incarnation=identity.incarnation,
            address=identity.address,
            pid=identity.pid,
            rank_pids=self.welcome.rank_pids if self.welcome else ((self.rank_pid,) if self.rank_pid else ()),
            ready=not self.not_ready,
            draining=self.draining or load.draining,
            blocks=_block_status(load.blocks),
            leases=load.leases,
            running=load.running,
            waiting=load.waiting,
            prefill_queue_tokens=load.prefill_queue_tokens,
            peers=tuple(_peer_status(state) for state in self.peers),
        )


def _no_load(role: Role) -> Load:
    blocks = BlockCounts(total=0, free=0, cached=0, leased=0, quarantined=0)
    return Load(
        seq=0, role=role, draining=False, blocks=blocks, leases=0, running=0, waiting=0, prefill_queue_tokens=0, decode_context_tokens=0
    )


def _block_status(blocks: BlockCounts) -> BlockStatus:
    return BlockStatus(total=blocks.total, free=blocks.free, cached=blocks.cached, leased=blocks.leased, quarantined=blocks.quarantined)


def _peer_status(state: PeerState) -> PeerLaneStatus:
    return PeerLaneStatus(
        peer=str(state.peer),
        joined=state.joined,
        lane=state.lane,
        one_sided=state.one_sided,
        bandwidth_bytes_per_s=state.bandwidth,
        detail=state.detail,
    )
