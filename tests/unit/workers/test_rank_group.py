from __future__ import annotations

import numpy as np
import pytest

from pd_serve.engine.batch import SampledToken, StepResult
from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.kv.routes import plan_routes
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Abandon, Completed, NoticeUnion, Quiesced
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused, WriteWindow
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
from workers.rank_group import RankGroup, rank_peer
from workers.transport_commands import PeerRemoved

OTHER = PeerId(WorkerId("other"), Incarnation(7))
LEASE = Lease(LeaseId(3), Epoch(4), OTHER)
SHAPES = [(8, 1, 1), (8, 1, 2), (8, 2, 1), (8, 2, 4), (8, 4, 2), (2, 4, 2), (2, 4, 8), (1, 2, 4)]
"""(KV heads, our ranks, the other's): with fewer heads than ranks, heads are replicated."""


def metadata(num_ranks: int) -> tuple[bytes, ...]:
    return tuple(b"m%d" % rank for rank in range(num_ranks))


def pairs_of(heads: int, ours: int, theirs: int) -> set[tuple[int, int]]:
    there = {(route.src_rank, route.dst_rank) for route in plan_routes(heads, ours, theirs)}
    return there | {(route.dst_rank, route.src_rank) for route in plan_routes(heads, theirs, ours)}


def joined(peer: PeerId, lane: str = "posix", bandwidth: float = 5.0) -> TransportReported:
    return TransportReported(PeerJoined(peer, lane, lane == "posix", bandwidth, 0.1))


def join_all(group: RankGroup, heads: int, ours: int, theirs: int) -> list[Event]:
    group.commands(AddPeer(OTHER, metadata(theirs)))
    events: list[Event] = []
    for rank, other in sorted(pairs_of(heads, ours, theirs)):
        assert events == []
        events += group.events(rank, joined(rank_peer(OTHER, other)))
    return events


def group_of(heads: int, ours: int, theirs: int) -> RankGroup:
    group = RankGroup(ours, heads)
    assert len(join_all(group, heads, ours, theirs)) == 1
    return group


def plan_for(src_rank: int, dst_rank: int) -> PushPlan:
    return PushPlan(AttemptId(1), LEASE, np.array([[0, 0, 8]]), 8, 8, 1, 0, src_rank=src_rank, dst_rank=dst_rank)


def completed(contributor: int) -> Completed:
    return Completed(LEASE.lease_id, LEASE.epoch, AttemptId(1), contributor, 2, 5, None, 4, 1, 8, 0, 0.0)


@pytest.mark.parametrize(("heads", "ours", "theirs"), SHAPES)
def test_every_pair_with_a_route_joins_and_the_last_one_makes_the_peer_joined(heads: int, ours: int, theirs: int) -> None:
    group = RankGroup(ours, heads)
    commands = group.commands(AddPeer(OTHER, metadata(theirs)))
    wanted = pairs_of(heads, ours, theirs)
    assert sorted((rank, command.peer) for rank, command in commands if isinstance(command, AddPeer)) == sorted(
        (rank, rank_peer(OTHER, other)) for rank, other in wanted
    )
    assert all(command == AddPeer(command.peer, command.metadata) for _, command in commands if isinstance(command, AddPeer))
    assert {command.metadata for _, command in commands if isinstance(command, AddPeer)} == {(data,) for data in metadata(theirs)}
    (event,) = join_all(RankGroup(ours, heads), heads, ours, theirs)
    assert event == TransportReported(PeerJoined(OTHER, "posix", True, 5.0 * len(wanted), 0.1))


@pytest.mark.parametrize(("heads", "ours", "theirs"), SHAPES)
def test_both_sides_join_the_same_pairs_and_those_of_the_ranks_0_always(heads: int, ours: int, theirs: int) -> None:
    there = pairs_of(heads, ours, theirs)
    assert {(other, rank) for rank, other in pairs_of(heads, theirs, ours)} == there
    assert (0, 0) in there


def test_one_rank_on_each_side_changes_nothing() -> None:
    group = group_of(8, 1, 1)
    window = OpenWindow(WriteWindow(LEASE.lease_id, LEASE.epoch, OTHER, np.array([0]), np.array([8])))
    flush = FlushThenNotify(OTHER, 1, completed(0), 2.0)
    for action in (window, CloseWindow(LEASE.lease_id), PushNow(plan_for(0, 0)), StopPush(LEASE), flush, HardFence(OTHER)):
        ((rank, command),) = group.commands(action)
        assert rank == 0
        assert command is action or command == action
    assert group.pushes(0, (plan := plan_for(0, 0),)) == (plan,)
    done = StepDone(StepResult(1, (), 0.0, 1.0))
    for output in (done, WindowOpened(LEASE.lease_id), WindowClosed(LEASE.lease_id, True), FlushDone(1, True)):
        assert group.events(0, output) == [output]
    assert group.events(0, NoticeArrived(OTHER, completed(0))) == [NoticeArrived(OTHER, completed(0))]
    lost = TransportReported(PeerLost(OTHER, "gone", False))
    assert group.events(0, lost) == [lost]
    fenced = TransportReported(PeerFenced(OTHER))
    assert group.events(0, fenced) == [fenced]


def test_a_refused_pair_refuses_the_peer_once() -> None:
    group = RankGroup(2, 8)
    group.commands(AddPeer(OTHER, metadata(2)))
    assert group.events(0, joined(OTHER)) == []
    (event,) = group.events(1, TransportReported(PeerRefused(rank_peer(OTHER, 1), "bad digest")))
    assert event == TransportReported(PeerRefused(OTHER, "rank 1 with rank 1: bad digest"))
    assert group.events(1, TransportReported(PeerRefused(rank_peer(OTHER, 1), "again"))) == []
    assert group.events(1, joined(rank_peer(OTHER, 1))) == []


@pytest.mark.parametrize("first_is_fenced", [True, False])
def test_a_peer_is_lost_with_its_first_pair_and_fenced_with_its_last(first_is_fenced: bool) -> None:
    group = group_of(8, 1, 2)
    (event,) = group.events(0, TransportReported(PeerLost(rank_peer(OTHER, 1), "died", first_is_fenced)))
    assert event == TransportReported(PeerLost(OTHER, "rank 0 with rank 1: died", False))
    last = group.events(0, TransportReported(PeerLost(OTHER, "died", True)))
    if not first_is_fenced:
        assert last == []
        last = group.events(0, TransportReported(PeerFenced(rank_peer(OTHER, 1))))
    assert last == [TransportReported(PeerFenced(OTHER))]
    assert group.events(0, TransportReported(PeerFenced(OTHER))) == []


def test_news_of_an_earlier_join_is_not_taken_for_the_next() -> None:
    group = group_of(8, 2, 2)
    assert len(group.commands(RemovePeer(OTHER))) == 2
    group.commands(AddPeer(OTHER, metadata(2)))
    assert group.events(0, joined(OTHER)) == []
    late = TransportReported(PeerLost(rank_peer(OTHER, 1), "of the first join", True))
    assert group.events(1, late) == []
    assert group.events(1, NoticeArrived(rank_peer(OTHER, 1), completed(1))) == []
    assert group.events(0, PeerRemoved(OTHER)) == group.events(1, PeerRemoved(rank_peer(OTHER, 1))) == []
    assert group.events(0, joined(OTHER)) == []
    assert len(group.events(1, joined(rank_peer(OTHER, 1)))) == 1


@pytest.mark.parametrize(("heads", "ours", "theirs"), SHAPES)
def test_windows_are_opened_on_every_rank_for_its_writers_only(heads: int, ours: int, theirs: int) -> None:
    group = group_of(heads, ours, theirs)
    window = WriteWindow(LEASE.lease_id, LEASE.epoch, OTHER, np.array([0]), np.array([8]))
    routes = plan_routes(heads, theirs, ours)
    commands = group.commands(OpenWindow(window))
    assert [rank for rank, _ in commands] == list(range(ours))
    for rank, command in commands:
        assert isinstance(command, OpenWindow)
        assert set(command.window.writers) == {rank_peer(OTHER, route.src_rank) for route in routes if route.dst_rank == rank}
    events = [event for rank in range(ours) for event in group.events(rank, WindowOpened(LEASE.lease_id))]
    assert events == [WindowOpened(LEASE.lease_id)]


@pytest.mark.parametrize("fenced", [(True, True), (True, False), (False, True)])
def test_a_window_is_a_fence_only_where_it_is_on_every_rank(fenced: tuple[bool, bool]) -> None:
    group = group_of(8, 2, 1)
    assert [rank for rank, _ in group.commands(CloseWindow(LEASE.lease_id))] == [0, 1]
    assert group.events(1, WindowClosed(LEASE.lease_id, fenced[0])) == []
    assert group.events(1, WindowClosed(LEASE.lease_id, True)) == []
    assert group.events(0, WindowClosed(LEASE.lease_id, fenced[1])) == [WindowClosed(LEASE.lease_id, all(fenced))]


def test_pushes_and_flushes_go_from_rank_to_rank() -> None:
    group = group_of(8, 2, 4)
    ((rank, command),) = group.commands(PushNow(plan_for(1, 3)))
    assert rank == 1
    assert isinstance(command, PushNow)
    assert command.plan.lease == Lease(LEASE.lease_id, LEASE.epoch, rank_peer(OTHER, 3))
    plans = tuple(plan_for(src, dst) for src, dst in ((0, 0), (0, 1), (1, 2), (1, 3)))
    assert [plan.lease.holder for plan in group.pushes(1, plans)] == [rank_peer(OTHER, 2), rank_peer(OTHER, 3)]
    ((rank, flush),) = group.commands(FlushThenNotify(OTHER, 9, completed(3), 1.0, 1, 3))
    assert (rank, flush) == (1, FlushThenNotify(rank_peer(OTHER, 3), 9, completed(3), 1.0, 1, 3))
    stops = {(rank, stop.lease.holder) for rank, stop in group.commands(StopPush(LEASE)) if isinstance(stop, StopPush)}
    assert stops == {(0, OTHER), (0, rank_peer(OTHER, 1)), (1, rank_peer(OTHER, 2)), (1, rank_peer(OTHER, 3))}
    assert group.commands(SendNotice(OTHER, Abandon(LEASE.lease_id, LEASE.epoch)))[0][0] == 0


@pytest.mark.parametrize(("heads", "ours", "theirs"), SHAPES)
def test_a_hard_fence_reaches_every_rank_of_the_peer_once(heads: int, ours: int, theirs: int) -> None:
    commands = group_of(heads, ours, theirs).commands(HardFence(OTHER))
    assert sorted(command.peer for _, command in commands if isinstance(command, HardFence)) == sorted(
        rank_peer(OTHER, rank) for rank in range(theirs)
    )


@pytest.mark.parametrize(("heads", "ours", "theirs"), SHAPES)
def test_only_the_ranks_of_a_route_speak_for_its_contributor(heads: int, ours: int, theirs: int) -> None:
    group = group_of(heads, ours, theirs)
    routes = plan_routes(heads, theirs, ours)
    for rank, other in pairs_of(heads, ours, theirs):
        for index in range(-2, len(routes) + 1):
            is_own = 0 <= index < len(routes) and (routes[index].dst_rank, routes[index].src_rank) == (rank, other)
            is_own |= index == ALL_CONTRIBUTORS and (rank, other) == (0, 0)
            notices: list[NoticeUnion] = [Quiesced(LEASE.lease_id, LEASE.epoch, index)]
            notices += [completed(index)] if index != ALL_CONTRIBUTORS else []
            for notice in notices:
                events = group.events(rank, NoticeArrived(rank_peer(OTHER, other), notice))
                assert events == ([NoticeArrived(OTHER, notice)] if is_own else [])
                assert group.take_strays() == (0 if is_own else 1)


def test_a_step_ends_with_its_last_rank_and_fails_if_one_does() -> None:
    group = RankGroup(2, 8)
    own = StepDone(StepResult(1, (SampledToken(AttemptId(1), 5, None),), 0.0, 1.0))
    other = StepDone(StepResult(1, (), 0.0, 2.0))
    assert group.events(1, other) == []
    assert group.events(0, own) == [own]
    assert group.events(0, StepDone(StepResult(2, (), 0.0, 1.0))) == []
    assert group.events(1, StepFailed(2, "no memory")) == [StepFailed(2, "rank 1: no memory")]


def test_ranks_that_cannot_be_routed_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be shared out"):
        RankGroup(2, 8).commands(AddPeer(OTHER, metadata(3)))
