"""A linked worker as `pd-serve status` and the admin API show it. Made when somebody asks."""

from __future__ import annotations

from pd_serve.protocol.control import BlockStatus, BreakerStatus, PeerLaneStatus, WorkerStatus
from router.breaker import Breakers
from router.linked_worker import LinkedWorker


def status_of(worker: LinkedWorker, breakers: Breakers, now: float) -> WorkerStatus:
    load, welcome = worker.load, worker.welcome
    blocks = BlockStatus(
        total=load.blocks.total,
        free=load.blocks.free,
        cached=load.blocks.cached,
        leased=load.blocks.leased,
        quarantined=load.blocks.quarantined,
    )
    peers = tuple(
        PeerLaneStatus(
            peer=str(state.peer),
            joined=state.joined,
            lane=state.lane,
            one_sided=state.one_sided,
            bandwidth_bytes_per_s=state.bandwidth,
            detail=state.detail,
        )
        for state in worker.peer_status.states
    )
    return WorkerStatus(
        id=worker.peer.worker_id,
        role=load.role,
        incarnation=worker.peer.incarnation,
        address=worker.address,
        pid=welcome.pid,
        rank_pids=welcome.rank_pids,
        ready=worker.is_available,
        draining=load.draining and worker.has_reported,
        blocks=blocks,
        leases=load.leases,
        running=load.running,
        waiting=load.waiting,
        prefill_queue_tokens=load.prefill_queue_tokens,
        peers=peers,
        breakers=tuple(
            BreakerStatus(leg=leg.value, state=state.value, failures=failures) for leg, state, failures in breakers.states(worker.peer, now)
        ),
    )
