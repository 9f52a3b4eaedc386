"""Seeded faults in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from pd_serve.clock import VirtualClock
from pd_serve.errors import ConfigError, OutOfBoundsError
from pd_serve.transport.base import Flushed, NoticeReceived, PeerFenced, PeerLost, TransportEvent
from pd_serve.transport.fault_plan import FaultPlan, plan_from_environment
from pd_serve.transport.faulty import FaultyTransport
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.transport_nodes import POOL_NBYTES, Node, Nodes, ops


@dataclass
class World:
    """Two joined nodes whose clock stands still."""

    clock: VirtualClock
    nodes: Nodes
    a: Node
    b: Node

    @property
    def faults(self) -> FaultyTransport:
        assert isinstance(self.a.transport, FaultyTransport)
        return self.a.transport

    def settle(self) -> None:
        """Everything that is due now."""
        happened = True
        while happened:
            happened = self.a.transport.progress() | self.b.transport.progress()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    for world in made:
        world.nodes.close()


def make(worlds: list[World], plan: FaultPlan, lanes: str = "shm") -> World:
    clock = VirtualClock(50.0)
    inner = partial(LoopbackTransport, fabric=LoopbackFabric(), clock=clock)
    nodes = Nodes(partial(FaultyTransport, plan=plan, inner=inner, clock=clock), lanes, lanes == "shm")
    a, b = nodes.joined("a", "b")
    b.open_window(a.peer)
    world = World(clock, nodes, a, b)
    worlds.append(world)
    return world


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_delayed_operations_keep_their_order(worlds: list[World], lanes: str) -> None:
    world = make(worlds, FaultPlan(delay_s=(0.1, 0.2)), lanes)
    world.a.write(world.b.peer, ops((0, 0, 64)))
    token = world.a.flush(world.b.peer)
    world.a.transport.notify(world.b.peer, b"done")
    world.advance(0.05)
    assert world.b.memory.max() == 0
    assert not world.a.transport.busy()
    deadline = world.a.transport.next_deadline()
    assert deadline is not None
    assert 50.1 <= deadline <= 50.2
    world.advance(0.2)
    assert (world.b.memory[:64] == world.a.memory[:64]).all()
    assert world.a.flushed(token) == Flushed(token, True)
    assert world.b.notices() == [b"done"]
    assert world.a.transport.next_deadline() is None


def received(worlds: list[World], plan: FaultPlan) -> list[int]:
    world = make(worlds, plan)
    for number in range(200):
        world.a.transport.notify(world.b.peer, b"%d" % number)
        world.advance(0.001)
    world.advance(1.0)
    return [int(payload) for payload in world.b.notices()]


def test_lost_notices_are_lost_and_a_seed_replays(worlds: list[World]) -> None:
    arrived = received(worlds, FaultPlan(seed=3, notice_loss=0.25))
    assert 110 < len(arrived) < 190
    assert arrived == sorted(arrived)
    assert received(worlds, FaultPlan(seed=3, notice_loss=0.25)) == arrived
    assert received(worlds, FaultPlan(seed=4, notice_loss=0.25)) != arrived


def test_duplicated_notices_arrive_twice(worlds: list[World]) -> None:
    arrived = received(worlds, FaultPlan(seed=1, notice_duplicate=0.5))
    assert sorted(set(arrived)) == list(range(200))
    assert 250 < len(arrived) < 350


def test_reordered_notices_are_overtaken_and_none_is_lost(worlds: list[World]) -> None:
    arrived = received(worlds, FaultPlan(seed=1, notice_reorder=0.2, reorder_s=0.01))
    assert arrived != sorted(arrived)
    assert sorted(arrived) == list(range(200))


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_a_throttled_link_takes_bytes_over_bandwidth(worlds: list[World], lanes: str) -> None:
    world = make(worlds, FaultPlan(bandwidth=1e6), lanes)
    for index in range(10):
        world.a.write(world.b.peer, ops((index * 1000, index * 1000, 1000)))
    token = world.a.flush(world.b.peer)
    world.advance(0.0055)
    assert world.b.memory[4999] != 0
    assert world.b.memory[5000:].max() == 0
    world.advance(0.004)
    assert world.a.flushed(token) is None
    world.advance(0.001)
    assert world.a.flushed(token) == Flushed(token, True)


def test_flush_failures_are_told_although_bytes_arrived(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan(flush_failure=1.0))
    world.a.write(world.b.peer, ops((0, 0, 64)))
    token = world.a.flush(world.b.peer)
    world.settle()
    assert world.a.flushed(token) == Flushed(token, False, "planted failure")
    assert (world.b.memory[:64] == world.a.memory[:64]).all()


def test_a_stalled_writer_issues_everything_when_it_resumes(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan())
    world.faults.stall(world.b.peer)
    world.a.write(world.b.peer, ops((0, 0, 64)))
    token = world.a.flush(world.b.peer)
    world.advance(100.0)
    assert world.b.memory.max() == 0
    assert world.a.transport.next_deadline() is None
    world.faults.resume(world.b.peer)
    world.settle()
    assert world.a.flushed(token) == Flushed(token, True)
    assert world.b.memory[:64].min() > 0


def test_a_cut_fails_flushes_then_tells_the_loss_then_is_silent(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan(delay_s=(0.1, 0.1)))
    token = world.a.flush(world.b.peer)
    del world.a.events[:]
    world.faults.cut(world.b.peer)
    later = world.a.flush(world.b.peer)
    world.advance(1.0)
    detail = f"{world.b.peer} was cut off"
    assert [event for event in world.a.events if isinstance(event, PeerLost)] == [PeerLost(world.b.peer, "cut off", fenced=True)]
    assert world.a.events[0] == Flushed(token, False, detail)
    assert world.a.flushed(later) == Flushed(later, False, detail)
    assert world.b.has_ended(world.a.peer)


def test_an_unfenced_cut_lets_one_sided_writes_land_until_the_fence(worlds: list[World]) -> None:
    """The silent writer: decode has lost it, it does not know, and its puts still arrive."""
    world = make(worlds, FaultPlan())
    decode, writer = world.faults, world.b
    decode.cut(writer.peer, fenced_after_s=5.0)
    world.settle()
    assert world.a.of(PeerLost) == [PeerLost(writer.peer, "cut off", fenced=False)]
    world.a.memory[:] = 0
    writer.memory[:] = 7
    writer.write(world.a.peer, ops((0, 0, 64)))
    writer.transport.notify(world.a.peer, b"nobody hears this")
    world.advance(1.0)
    assert world.a.memory[:64].min() == 7
    assert world.a.of(NoticeReceived) == []
    world.advance(4.5)
    assert world.a.events[-1] == PeerFenced(writer.peer)
    assert writer.has_ended(world.a.peer)
    writer.write(world.a.peer, ops((0, 1024, 64)))
    assert world.a.memory[1024:1088].max() == 0


def test_a_planned_cut_comes_after_the_join_and_the_peer_can_come_back(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan(cut_after_s=(("b", 2.0),)))
    world.advance(1.9)
    assert not world.a.has_ended(world.b.peer)
    world.advance(0.2)
    assert world.a.has_ended(world.b.peer)
    for node in (world.a, world.b):
        node.events.clear()
    world.nodes.join([world.a, world.b])
    assert world.nodes.flush(world.a, world.b.peer).ok


def test_the_loss_of_the_inner_peer_fails_what_is_held(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan(delay_s=(1.0, 1.0)))
    token = world.a.flush(world.b.peer)
    world.b.transport.close()
    world.a.transport.progress()
    events: list[TransportEvent] = world.a.events[-2:]
    assert [type(event) for event in events] == [Flushed, PeerLost]
    assert world.a.flushed(token) == Flushed(token, False, f"{world.b.peer} is gone")
    world.clock.advance(5.0)
    world.a.transport.progress()
    assert len(world.a.of(Flushed)) == 1


def test_bounds_are_checked_at_once_or_fail_the_flush(worlds: list[World]) -> None:
    world = make(worlds, FaultPlan(delay_s=(0.1, 0.1)))
    with pytest.raises(OutOfBoundsError):
        world.a.write(world.b.peer, ops((POOL_NBYTES, 0, 1)))
    world.a.write(world.b.peer, ops((0, POOL_NBYTES, 1)))
    bad = world.a.flush(world.b.peer)
    good = world.a.flush(world.b.peer)
    world.advance(0.2)
    assert [world.a.flushed(token).ok for token in (bad, good) if world.a.flushed(token) is not None] == [False, True]


def test_the_plan_of_a_process_comes_from_its_environment() -> None:
    assert plan_from_environment({}) == FaultPlan()
    assert plan_from_environment({"PD_FAULT_PLAN": '{"inner": "ucx", "notice_loss": 0.01}'}) == FaultPlan(inner="ucx", notice_loss=0.01)
    with pytest.raises(ConfigError, match="PD_FAULT_PLAN"):
        plan_from_environment({"PD_FAULT_PLAN": '{"loss": 1}'})
