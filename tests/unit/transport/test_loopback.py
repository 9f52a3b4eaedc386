"""What only the loopback transport promises; the rest is in tests/contract."""

from __future__ import annotations

import gc
import os
from functools import partial

import msgspec
import pytest

from pd_serve.errors import TransportError
from pd_serve.transport.base import PeerJoined, PeerLost, PeerRefused
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from pd_serve.transport.registry import transport_factory
from tests.transport_nodes import Nodes, ops, peer_id, settings_for


def loopbacks(lanes: str) -> Nodes:
    return Nodes(partial(LoopbackTransport, fabric=LoopbackFabric()), lanes, lanes == "shm")


@pytest.mark.parametrize(
    ("lanes", "hosts", "expected"),
    [
        (("auto", "auto"), ("x", "x"), "loopback-shm"),
        (("auto", "auto"), ("x", "y"), "loopback-tcp"),
        (("tcp", "auto"), ("x", "x"), "loopback-tcp"),
        (("shm", "shm"), ("x", "y"), None),
        (("shm", "tcp"), ("x", "x"), None),
    ],
)
def test_both_sides_pick_the_best_common_path(lanes: tuple[str, str], hosts: tuple[str, str], expected: str | None) -> None:
    nodes = loopbacks("auto")
    fabric = LoopbackFabric()
    made = []
    for name, lane, host in zip("ab", lanes, hosts, strict=True):
        nodes.factory = lambda settings, sink, lane=lane, host=host: LoopbackTransport(
            msgspec.structs.replace(settings, lanes=lane, host_id=host), sink, fabric
        )
        made.append(nodes.make(peer_id(name)))
    a, b = made
    a.transport.add_peer(b.peer, b.metadata)
    b.transport.add_peer(a.peer, a.metadata)
    nodes.pump(lambda: len(a.events) > 0 and len(b.events) > 0, "both decide")
    for node in made:
        (event,) = node.events
        assert (event.lane if isinstance(event, PeerJoined) else None) == expected
        assert expected is not None or isinstance(event, PeerRefused)
    nodes.close()


def test_a_peer_below_the_least_bandwidth_is_refused() -> None:
    fabric = LoopbackFabric()
    nodes = loopbacks("shm")
    nodes.factory = lambda settings, sink: LoopbackTransport(msgspec.structs.replace(settings, min_bandwidth=1e18), sink, fabric)
    a, b = nodes.make(peer_id("a")), nodes.make(peer_id("b"))
    a.transport.add_peer(b.peer, b.metadata)
    b.transport.add_peer(a.peer, a.metadata)
    nodes.pump(lambda: a.has_ended(b.peer) and b.has_ended(a.peer), "both refuse")
    (refused,) = a.of(PeerRefused)
    assert isinstance(refused, PeerRefused)
    nodes.close()


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
def test_a_hard_fence_ends_the_peer_for_everybody(lanes: str) -> None:
    nodes = loopbacks(lanes)
    a, b, writer = nodes.joined("a", "b", "c")
    a.open_window(writer.peer)
    assert a.transport.hard_fence(writer.peer)
    writer.memory[:] = 9
    writer.write(a.peer, ops((0, 0, 64)))
    nodes.pump(lambda: a.has_ended(writer.peer) and b.has_ended(writer.peer), "both lose it")
    assert a.of(PeerLost) == [PeerLost(writer.peer, "ended by force", fenced=True)]
    assert (a.memory[:64] != 9).any()
    assert not nodes.flush(writer, a.peer).ok
    assert not a.transport.hard_fence(writer.peer)
    nodes.close()


def test_transports_made_by_name_find_each_other() -> None:
    nodes = Nodes(transport_factory("loopback"), "auto", True)
    nodes.joined("a", "b")
    nodes.close()


def test_a_lane_that_is_not_there_is_an_error() -> None:
    with pytest.raises(TransportError, match="rdma"):
        LoopbackTransport(settings_for(peer_id("a"), "rdma"), lambda _: None, LoopbackFabric())


def test_a_thousand_joins_and_ends_leave_no_descriptor() -> None:
    nodes = loopbacks("tcp")
    (stays,) = nodes.joined("stays")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1000):
        other = nodes.make(peer_id(f"w{number}"), pool_nbytes=4096)
        nodes.join([stays, other])
        other.transport.close()
        nodes.pump(lambda other=other: stays.has_ended(other.peer), "the end is told", [stays])
        nodes.made.remove(other)
        stays.events.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    nodes.close()
