"""Nothing passes before a hello that both answered: right secret, right incarnation."""

from __future__ import annotations

from pd_serve.transport.base import PeerJoined, PeerLost, PeerRefused
from tests.transport_nodes import POOL_NBYTES, Nodes, ops, peer_id


def test_a_join_names_lane_path_and_bandwidth_on_both_sides(nodes: Nodes) -> None:
    for node in nodes.joined("a", "b"):
        (joined,) = node.of(PeerJoined)
        assert isinstance(joined, PeerJoined)
        assert joined.lane != ""
        assert joined.one_sided is nodes.one_sided
        assert joined.bandwidth > 0
        assert joined.round_trip_s >= 0


def test_adding_a_known_peer_again_changes_nothing(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    a.transport.add_peer(b.peer, b.metadata)
    nodes.pump_for(0.02)
    assert len(a.of(PeerJoined)) == 1
    assert len(b.of(PeerJoined)) == 1


def test_the_probe_leaves_no_trace_in_the_pool(nodes: Nodes) -> None:
    _, target = nodes.joined("a", "b")
    assert target.memory.max() == 0


def test_a_wrong_secret_is_refused_on_both_sides(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=1.0)
    b = nodes.make(peer_id("b"), secret=b"another", join_timeout_s=1.0)
    a.transport.add_peer(b.peer, b.metadata)
    b.transport.add_peer(a.peer, a.metadata)
    nodes.pump(lambda: a.has_ended(b.peer) and b.has_ended(a.peer), "both refuse")
    nodes.pump_for(0.05)
    for node in (a, b):
        assert len(node.of(PeerRefused)) == 1
        assert node.of(PeerJoined) == []
        assert node.transport.counters().refused_hellos >= 1
    a.transport.notify(b.peer, b"psst")
    a.write(b.peer, ops((0, 0, 64)))
    assert not nodes.flush(a, b.peer).ok
    assert b.notices() == []


def test_metadata_of_a_gone_incarnation_is_refused(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=0.5)
    old = nodes.make(peer_id("b", 1))
    old.transport.close()
    new = nodes.make(peer_id("b", 2))
    new.transport.add_peer(a.peer, a.metadata)
    a.transport.add_peer(old.peer, old.metadata)
    nodes.pump(lambda: a.has_ended(old.peer), "the old incarnation is refused", [a, new])
    assert a.of(PeerJoined) == []
    # The worker is known by its new incarnation from here on.
    nodes.join_at_last(a, new)


def test_an_old_incarnation_at_the_address_of_its_successor_is_refused(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=0.5)
    successor = nodes.make(peer_id("b", 2), join_timeout_s=0.5)
    successor.transport.add_peer(a.peer, a.metadata)
    a.transport.add_peer(peer_id("b", 1), successor.metadata)
    nodes.pump(lambda: a.has_ended(peer_id("b", 1)), "the impostor is refused")
    assert a.of(PeerJoined) == []
    assert successor.of(PeerJoined) == []


def test_nothing_passes_to_a_peer_that_has_not_answered(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=0.3)
    b = nodes.make(peer_id("b"))
    a.memory[:] = 1
    b.open_window(a.peer)
    a.transport.add_peer(b.peer, b.metadata)
    a.write(b.peer, ops((0, 0, POOL_NBYTES)))
    a.transport.notify(b.peer, b"too early")
    assert not nodes.flush(a, b.peer).ok
    nodes.pump(lambda: a.has_ended(b.peer), "the join times out")
    assert isinstance(a.events[-1], PeerRefused)
    assert b.notices() == []
    assert b.memory.max() == 0
    assert b.of(PeerLost) == []


def test_malformed_metadata_is_refused_not_raised(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=0.3)
    for number, metadata in enumerate((b"", b"\x00" * 40, b"\xff" * 1000, a.metadata[:-3])):
        peer = peer_id(f"b{number}")
        a.transport.add_peer(peer, metadata)
        nodes.pump(lambda peer=peer: a.has_ended(peer), f"{metadata[:8]!r} is refused")


def test_a_refused_peer_can_join_later(nodes: Nodes) -> None:
    a = nodes.make(peer_id("a"), join_timeout_s=0.5)
    b = nodes.make(peer_id("b"))
    a.transport.add_peer(b.peer, b.metadata)
    nodes.pump(lambda: a.has_ended(b.peer), "the first join times out")
    nodes.join_at_last(a, b)
