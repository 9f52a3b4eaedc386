"""Joins over connections that lose and fail, in virtual time: what one side's connection lost is asked for again when it has another.

UCX may pair a new connection with the half that an earlier try left on the other side: it delivers the handshake, loses all that follows,
and is found to have been reset some tenths of a second later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from pd_serve.clock import VirtualClock
from pd_serve.transport.base import PeerJoined, PeerRefused, TransportEvent
from pd_serve.transport.ucx.peer import Peer, Phase
from pd_serve.transport.ucx.transport import UcxTransport
from tests.transport_nodes import peer_id, settings_for
from tests.unit.transport.ucx.fake_binding import WireBinding, WireEndpoint, WireWorker

JOIN_TIMEOUT_S = 5.0
LEAST_BANDWIDTH = 1e6
TURN_S = 1e-4


@dataclass
class Side:
    transport: UcxTransport
    events: list[TransportEvent]

    @property
    def peer(self) -> Peer:
        (peer,) = self.transport._node.peers.values()
        return peer

    @property
    def is_probing(self) -> bool:
        return self.peer.phase is Phase.PROBING

    @property
    def has_joined(self) -> bool:
        return any(isinstance(event, PeerJoined) for event in self.events)

    @property
    def has_been_refused(self) -> bool:
        return any(isinstance(event, PeerRefused) for event in self.events)

    @property
    def endpoints(self) -> list[WireEndpoint]:
        (port,) = self.transport._node.ports
        assert isinstance(port.worker, WireWorker)
        return port.worker.endpoints


@dataclass
class World:
    clock: VirtualClock = field(default_factory=VirtualClock)
    binding: WireBinding = field(default_factory=WireBinding)
    sides: list[Side] = field(default_factory=list)

    def add(self, name: str) -> Side:
        events: list[TransportEvent] = []
        settings = settings_for(peer_id(name), "tcp", join_timeout_s=JOIN_TIMEOUT_S)
        settings = msgspec.structs.replace(settings, min_bandwidth=LEAST_BANDWIDTH)
        transport = UcxTransport(settings, events.append, self.binding, self.clock)
        transport.allocate_pool(1 << 16)
        self.sides.append(Side(transport, events))
        return self.sides[-1]

    def turn(self, side: Side) -> bool:
        """It takes some time: a round trip of none counts as none. True when something moved."""
        self.clock.advance(TURN_S)
        return side.transport.progress()

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """No side takes a step more."""
        for _ in range(100):
            for side in self.sides:
                if condition():
                    return
                self.turn(side)
        raise AssertionError("it does not come to that")

    def settle(self) -> None:
        while any([self.turn(side) for side in self.sides]):  # noqa: C419 - each takes its turn
            pass

    def pass_time(self, seconds: float) -> None:
        """In steps of the interval of hellos."""
        until = self.clock.now() + seconds
        while self.clock.now() < until:
            self.clock.advance(0.2)
            self.settle()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for side in world.sides:
        side.transport._node.peers.clear()
        side.transport.close()


def begin(world: World) -> tuple[Side, Side]:
    """Two sides that have added each other."""
    early, late = world.add("early"), world.add("late")
    for one, other in ((early, late), (late, early)):
        one.transport.add_peer(other.transport._settings.self_id, other.transport.export_metadata())
    return early, late


def test_a_join_needs_one_connection_of_each_side(world: World) -> None:
    early, late = begin(world)
    world.settle()
    assert early.has_joined
    assert late.has_joined
    assert [len(side.endpoints) for side in (early, late)] == [1, 1]


def test_what_a_failed_connection_lost_is_asked_for_again_over_the_next(world: World) -> None:
    """Its pongs, and its answers to the probe."""
    early, late = begin(world)
    world.turn_until(lambda: early.is_probing)
    late.endpoints[0].is_deaf = True
    world.settle()
    assert not early.has_joined
    late.endpoints[0].failure = "Connection reset by remote peer"
    world.pass_time(1.0)
    assert early.has_joined
    assert late.has_joined
    assert not early.has_been_refused
    assert [len(side.endpoints) for side in (early, late)] == [1, 2]


def test_time_in_which_the_other_connection_was_broken_is_no_slowness(world: World) -> None:
    """Answers to the second, timed pass of the probe are lost: taken for what it says, it was far below the least bandwidth allowed."""
    early, late = begin(world)
    world.turn_until(lambda: early.peer.probe_started > 0.0)
    late.endpoints[0].is_deaf = True
    world.settle()
    world.pass_time(3.0)
    late.endpoints[0].failure = "Connection reset by remote peer"
    world.pass_time(1.0)
    assert early.has_joined
    assert not early.has_been_refused


def test_a_connection_that_stays_broken_still_ends_in_a_refusal(world: World) -> None:
    early, late = begin(world)
    world.turn_until(lambda: early.is_probing)
    late.endpoints[0].is_deaf = True
    world.pass_time(JOIN_TIMEOUT_S + 0.4)
    assert early.has_been_refused
    assert not early.has_joined
