"""One worker of several ranks, as its machine sees it: peers are workers, one event for what every rank must have done. Pure.

Owned by the control thread of rank 0. Each rank has a Transport of its own and is a peer of its own to other workers' ranks:

    machine's action  -> commands() -> what each rank's transport is told            (worker-level peers -> peers by rank)
    a rank's output   -> events()   -> what the machine is told, once it holds for all  (peers by rank -> worker-level peers)

    AddPeer        every pair of ranks that a route (kv/routes.py) connects, either way, joins; PeerJoined when the last has
    PeerLost       when the first pair is; fenced (or PeerFenced) only when all pairs are
    windows        on every rank, for the ranks that have a route to it; opened, closed and fenced when all are
    pushes         of a route: from its source rank to its target rank
    records        of a contributor count only if they came along its route; Abandon travels between the ranks 0, which are always a pair
    RemovePeer     what a rank still says of a peer before it has carried that out (PeerRemoved) is not of the next join

With one rank on each side every action is one command, itself, and every output one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from pd_serve.engine.batch import StepResult
from pd_serve.ids import LeaseId, PeerId, WorkerId
from pd_serve.kv.routes import plan_routes
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Abandon
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from workers.events import (
    AddPeer,
    CloseWindow,
    Event,
    FlushDone,
    FlushThenNotify,
    HardFence,
    NoticeArrived,
    OpenWindow,
    PushNow,
    PushPlan,
    RemovePeer,
    SendNotice,
    StepDone,
    StepFailed,
    StopPush,
    TransportReported,
    WindowClosed,
    WindowOpened,
)
from workers.transport_commands import PeerRemoved

RANK_MARK = "#"
"""Between a worker's id and a rank's number; refused in the ids of workers."""

RankCommand = AddPeer | RemovePeer | OpenWindow | CloseWindow | PushNow | StopPush | FlushThenNotify | SendNotice | HardFence
RankOutput = TransportReported | NoticeArrived | FlushDone | WindowOpened | WindowClosed | PeerRemoved | StepDone | StepFailed
Pair = tuple[int, int]
"""A rank of this worker, a rank of the other."""


def rank_peer(peer: PeerId, rank: int) -> PeerId:
    """A rank of a worker as a peer of its own."""
    return PeerId(WorkerId(f"{peer.worker_id}{RANK_MARK}{rank}"), peer.incarnation) if rank else peer


@dataclass(slots=True)
class _Peer:
    """Another worker."""

    peer: PeerId
    routes_in: tuple[Pair, ...]
    """By contributor: (our rank, the rank that writes to it)."""
    routes_out: tuple[Pair, ...]
    joined: dict[Pair, PeerJoined] = field(default_factory=dict)
    fenced: set[Pair] = field(default_factory=set)
    is_up: bool = False
    is_down: bool = False
    is_fence_told: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(sorted({*self.routes_in, *self.routes_out}))

    @property
    def is_fenced(self) -> bool:
        return all(pair in self.fenced for pair in self.joined)


@dataclass(slots=True)
class _Step:
    """Ranks that have not ended it, and what came of it."""

    waiting: set[int]
    result: StepResult | None = None
    failure: str = ""


class RankGroup:
    def __init__(self, num_ranks: int, num_kv_heads: int) -> None:
        """`num_kv_heads`: of the model."""
        self._num_ranks = num_ranks
        self._num_kv_heads = num_kv_heads
        self._peers: dict[PeerId, _Peer] = {}
        self._pairs: dict[tuple[int, PeerId], tuple[_Peer, Pair]] = {}
        """By our rank and the id of the other's rank."""
        self._removing: Counter[tuple[int, PeerId]] = Counter()
        """Removals that the rank has not carried out."""
        self._opening: dict[LeaseId, set[int]] = {}
        self._closing: dict[LeaseId, tuple[set[int], bool]] = {}
        self._steps: dict[int, _Step] = {}
        self._num_strays = 0

    def take_strays(self) -> int:
        """Records dropped since the last call because they came from a rank that has no say in them."""
        strays, self._num_strays = self._num_strays, 0
        return strays

    @property
    def is_step_failing(self) -> bool:
        """A rank has failed a step that others have not ended: they may wait for its part."""
        return any(step.failure for step in self._steps.values())

    # ---- down

    def commands(self, action: RankCommand) -> list[tuple[int, RankCommand]]:
        """(rank, what its transport is told). Raises ValueError for an AddPeer whose ranks cannot be routed to ours."""
        match action:
            case AddPeer(peer, metadata):
                return self._add(peer, metadata)
            case RemovePeer(peer):
                return self._remove(peer)
            case HardFence(peer):
                return [(rank, HardFence(rank_peer(peer, other))) for rank, other in self._one_pair_each(peer)]
            case PushNow(plan):
                return [(plan.src_rank, PushNow(_to_rank(plan)) if plan.dst_rank else action)]
            case StopPush(lease):
                known = self._peers.get(lease.holder)
                pairs = known.routes_out if known is not None else ((0, 0),)
                return [
                    (rank, StopPush(msgspec.structs.replace(lease, holder=rank_peer(lease.holder, other))) if other else action)
                    for rank, other in pairs
                ]
            case FlushThenNotify():
                return [(action.src_rank, _flush_to_rank(action))]
            case SendNotice():
                return [(0, action)]
            case OpenWindow():
                return self._open(action)
            case CloseWindow(lease_id):
                self._closing[lease_id] = (set(range(self._num_ranks)), True)
                return [(rank, action) for rank in range(self._num_ranks)]

    def pushes(self, rank: int, plans: Iterable[PushPlan]) -> tuple[PushPlan, ...]:
        """Those of a step that are the rank's."""
        return tuple(_to_rank(plan) if plan.dst_rank else plan for plan in plans if plan.src_rank == rank)

    def completions(self, commands: Iterable[FlushThenNotify]) -> tuple[FlushThenNotify, ...]:
        """Those of a step, all of which are rank 0's: the others are not told what was sampled."""
        return tuple(_flush_to_rank(command) for command in commands)

    def _add(self, peer: PeerId, metadata: tuple[bytes, ...]) -> list[tuple[int, RankCommand]]:
        inward = plan_routes(self._num_kv_heads, len(metadata), self._num_ranks)
        outward = plan_routes(self._num_kv_heads, self._num_ranks, len(metadata))
        known = _Peer(
            peer,
            routes_in=tuple((route.dst_rank, route.src_rank) for route in inward),
            routes_out=tuple((route.src_rank, route.dst_rank) for route in outward),
        )
        self._peers[peer] = known
        commands: list[tuple[int, RankCommand]] = []
        for rank, other in known.pairs:
            other_id = rank_peer(peer, other)
            self._pairs[rank, other_id] = known, (rank, other)
            commands.append((rank, AddPeer(other_id, (metadata[other],))))
        return commands

    def _remove(self, peer: PeerId) -> list[tuple[int, RankCommand]]:
        known = self._peers.pop(peer, None)
        if known is None:
            return []
        commands: list[tuple[int, RankCommand]] = []
        for rank, other in known.pairs:
            other_id = rank_peer(peer, other)
            del self._pairs[rank, other_id]
            self._removing[rank, other_id] += 1
            commands.append((rank, RemovePeer(other_id)))
        return commands

    def _one_pair_each(self, peer: PeerId) -> list[Pair]:
        """A pair for each of the peer's ranks."""
        known = self._peers.get(peer)
        ours: dict[int, int] = {}
        for rank, other in known.pairs if known is not None else ():
            ours.setdefault(other, rank)
        return [(rank, other) for other, rank in ours.items()]

    def _open(self, action: OpenWindow) -> list[tuple[int, RankCommand]]:
        window = action.window
        known = self._peers.get(window.writer)
        routes = known.routes_in if known is not None else tuple((rank, 0) for rank in range(self._num_ranks))
        self._opening[window.lease_id] = set(range(self._num_ranks))
        commands: list[tuple[int, RankCommand]] = []
        for rank in range(self._num_ranks):
            first, *others = (rank_peer(window.writer, other) for ours, other in routes if ours == rank)
            own = replace(action, window=msgspec.structs.replace(window, writer=first, other_writers=tuple(others)))
            commands.append((rank, action if first == window.writer and not others else own))
        return commands

    # ---- up

    def events(self, rank: int, output: RankOutput) -> list[Event]:
        """What the machine learns from what one rank said."""
        match output:
            case StepDone() | StepFailed():
                return self._step_ended(rank, output)
            case TransportReported(report):
                return self._reported(rank, report)
            case NoticeArrived():
                return self._notice(rank, output)
            case FlushDone():
                return [output]
            case WindowOpened(lease_id):
                waiting = self._opening.get(lease_id)
                if waiting is None or rank not in waiting:
                    return []
                waiting.discard(rank)
                if waiting:
                    return []
                del self._opening[lease_id]
                return [output]
            case WindowClosed(lease_id, fenced):
                return self._closed(rank, lease_id, fenced)
            case PeerRemoved(peer):
                self._removing[rank, peer] -= 1
                if self._removing[rank, peer] <= 0:
                    del self._removing[rank, peer]
                return []

    def _step_ended(self, rank: int, output: StepDone | StepFailed) -> list[Event]:
        """A step has ended when it has on every rank. The result is rank 0's; one rank's failure is the step's."""
        if self._num_ranks == 1:
            return [output]
        step_id = output.result.step_id if isinstance(output, StepDone) else output.step_id
        step = self._steps.setdefault(step_id, _Step(set(range(self._num_ranks))))
        step.waiting.discard(rank)
        if isinstance(output, StepFailed):
            step.failure = step.failure or f"rank {rank}: {output.detail}"
        elif rank == 0:
            step.result = output.result
        if step.waiting:
            return []
        del self._steps[step_id]
        if step.failure or step.result is None:
            return [StepFailed(step_id, step.failure)]
        return [StepDone(step.result)]

    def _closed(self, rank: int, lease_id: LeaseId, fenced: bool) -> list[Event]:
        waiting, are_fenced = self._closing.get(lease_id, (set(), False))
        if rank not in waiting:
            return []
        waiting.discard(rank)
        are_fenced = are_fenced and fenced
        if waiting:
            self._closing[lease_id] = waiting, are_fenced
            return []
        del self._closing[lease_id]
        return [WindowClosed(lease_id, are_fenced)]

    def _known(self, rank: int, other_id: PeerId) -> tuple[_Peer, Pair] | None:
        """The join that a rank speaks of; None if that is over."""
        return None if (rank, other_id) in self._removing else self._pairs.get((rank, other_id))

    def _notice(self, rank: int, output: NoticeArrived) -> list[Event]:
        found = self._known(rank, output.peer)
        if found is None:
            return []
        known, pair = found
        notice = output.notice
        if isinstance(notice, Abandon) or notice.contributor == ALL_CONTRIBUTORS:
            may_say_so = pair == (0, 0)
        else:
            may_say_so = 0 <= notice.contributor < len(known.routes_in) and known.routes_in[notice.contributor] == pair
        if not may_say_so:
            self._num_strays += 1
            return []
        return [replace(output, peer=known.peer) if pair[1] else output]

    def _reported(self, rank: int, report: PeerJoined | PeerRefused | PeerLost | PeerFenced) -> list[Event]:
        found = self._known(rank, report.peer)
        if found is None:
            return []
        known, pair = found
        detail = "" if len(known.pairs) == 1 else f"rank {pair[0]} with rank {pair[1]}: "
        match report:
            case PeerJoined():
                known.joined[pair] = report
                if known.is_down or len(known.joined) < len(known.pairs):
                    return []
                known.is_up = True
                return [TransportReported(_joined(known))]
            case PeerRefused():
                if known.is_up or known.is_down:
                    return []
                known.is_down = True
                return [TransportReported(PeerRefused(known.peer, detail + report.detail))]
            case PeerLost():
                if report.fenced:
                    known.fenced.add(pair)
                if known.is_down:
                    return self._fenced(known)
                known.is_down, known.is_up = True, False
                known.is_fence_told = known.is_fenced
                return [TransportReported(PeerLost(known.peer, detail + report.detail, known.is_fenced))]
            case PeerFenced():
                known.fenced.add(pair)
                return self._fenced(known)

    def _fenced(self, known: _Peer) -> list[Event]:
        """Said once, when no pair is left that could write."""
        if known.is_fence_told or not known.is_down or not known.is_fenced:
            return []
        known.is_fence_told = True
        return [TransportReported(PeerFenced(known.peer))]


def _joined(known: _Peer) -> PeerJoined:
    """Of all pairs together: the lane is that of the ranks 0, the bandwidth the sum."""
    joins = known.joined.values()
    return PeerJoined(
        peer=known.peer,
        lane=known.joined[0, 0].lane,
        one_sided=any(join.one_sided for join in joins),
        bandwidth=sum(join.bandwidth for join in joins),
        round_trip_s=max(join.round_trip_s for join in joins),
    )


def _to_rank(plan: PushPlan) -> PushPlan:
    """The same with the target's rank as the holder: by that name its transport knows it."""
    return replace(plan, lease=msgspec.structs.replace(plan.lease, holder=rank_peer(plan.lease.holder, plan.dst_rank)))


def _flush_to_rank(action: FlushThenNotify) -> FlushThenNotify:
    return replace(action, peer=rank_peer(action.peer, action.dst_rank)) if action.dst_rank else action
