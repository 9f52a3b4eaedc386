"""Which pairs of workers may work together, and which have joined. Made when somebody asks for the cluster's status."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.protocol.control import PairStatus
from pd_serve.protocol.exchange import conversion, differences
from pd_serve.protocol.link import PeerInfo, Role, Welcome
from router.linked_worker import LinkedWorker


def pair_statuses(workers: Sequence[LinkedWorker], refused: Sequence[tuple[Welcome, str]]) -> tuple[PairStatus, ...]:
    """Every prefill worker with every decode worker, in order of their ids. `refused`: workers that were not taken, and why."""
    infos = [(worker.welcome.info, worker.load.role, worker, "") for worker in workers]
    strangers = [(welcome.info, welcome.info.role, None, reason) for welcome, reason in refused]
    everybody = sorted([*infos, *strangers], key=lambda entry: entry[0].peer)
    return tuple(
        _pair(prefill, decode, writer, target, theirs or ours)
        for prefill, writer_role, writer, ours in everybody
        if writer_role is not Role.DECODE
        for decode, target_role, target, theirs in everybody
        if target_role is not Role.PREFILL and decode.peer != prefill.peer
    )


def _pair(prefill: PeerInfo, decode: PeerInfo, writer: LinkedWorker | None, target: LinkedWorker | None, refusal: str) -> PairStatus:
    found = differences(prefill, decode)
    reason = "; ".join(f"{what} {one} and {other}" for what, one, other in found) or refusal
    is_joined = writer is not None and target is not None and decode.peer in writer.joined and prefill.peer in target.joined
    lane = next((state.lane for state in writer.peer_status.states if state.peer == decode.peer), "") if writer and is_joined else ""
    return PairStatus(
        prefill=prefill.peer.worker_id,
        decode=decode.peer.worker_id,
        compatible=not reason,
        reason=reason,
        joined=is_joined,
        lane=lane,
        conversion="" if found else conversion(prefill, decode),
    )
