"""Peers that go: pending flushes fail first, then the loss is told, then there is silence."""

from __future__ import annotations

from pd_serve.transport.base import Flushed, PeerLost
from tests.transport_nodes import Nodes, ops


def test_closing_twice_is_once_and_no_event_follows(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    a.transport.close()
    num_events = len(a.events)
    a.transport.close()
    b.transport.notify(a.peer, b"still there?")
    nodes.pump_for(0.05, [b])
    a.transport.progress()
    assert len(a.events) == num_events


def test_a_peer_that_closes_is_lost_to_the_other(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    b.transport.close()
    nodes.pump(lambda: a.has_ended(b.peer), "the loss is told", [a])
    (lost,) = a.of(PeerLost)
    assert isinstance(lost, PeerLost)
    assert lost.fenced or nodes.one_sided
    assert not nodes.flush(a, b.peer, [a]).ok


def test_flushes_to_a_closing_peer_end_before_its_loss_is_told(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    b.open_window(a.peer)
    a.write(b.peer, ops((0, 0, 1 << 16)))
    tokens = [a.flush(b.peer) for _ in range(3)]
    b.transport.close()
    nodes.pump(lambda: a.has_ended(b.peer), "the loss is told", [a])
    lost_at = next(index for index, event in enumerate(a.events) if isinstance(event, PeerLost))
    flushed = [event for event in a.events[:lost_at] if isinstance(event, Flushed)]
    assert sorted(event.token for event in flushed) == tokens
    if not nodes.one_sided:
        # The target never took a step: an ok would be a lie.
        assert not any(event.ok for event in flushed)


def test_a_removed_peer_is_silent_and_removing_it_again_is_nothing(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    token = b.flush(a.peer)
    for number in range(20):
        b.transport.notify(a.peer, b"%d" % number)
    nodes.pump_for(0.01, [b])
    a.transport.remove_peer(b.peer)
    a.transport.remove_peer(b.peer)
    before = [event for event in a.events if not isinstance(event, Flushed)]
    nodes.pump(lambda: b.has_ended(a.peer), "the other side learns of it")
    nodes.pump_for(0.05)
    assert [event for event in a.events if not isinstance(event, Flushed)] == before
    assert b.flushed(token) is not None
    assert not nodes.flush(a, b.peer).ok


def test_flushes_pending_at_a_removal_are_answered(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    b.open_window(a.peer)
    a.write(b.peer, ops((0, 0, 1 << 16)))
    token = a.flush(b.peer)
    a.transport.remove_peer(b.peer)
    nodes.pump(lambda: a.flushed(token) is not None, "the flush ends", [a])


def test_a_removed_peer_can_join_again(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    a.transport.remove_peer(b.peer)
    nodes.pump(lambda: b.has_ended(a.peer), "the other side learns of it")
    b.transport.remove_peer(a.peer)
    for node in (a, b):
        node.events.clear()
    nodes.join([a, b])
    b.open_window(a.peer)
    a.write(b.peer, ops((0, 0, 4096)))
    assert nodes.flush(a, b.peer).ok
    assert (b.memory[:4096] == a.memory[:4096]).all()


def test_losing_one_peer_leaves_the_others_alone(nodes: Nodes) -> None:
    a, b, c = nodes.joined("a", "b", "c")
    c.open_window(a.peer)
    b.transport.close()
    nodes.pump(lambda: a.has_ended(b.peer) and c.has_ended(b.peer), "the loss is told", [a, c])
    a.write(c.peer, ops((0, 0, 4096)))
    assert nodes.flush(a, c.peer, [a, c]).ok
    assert (c.memory[:4096] == a.memory[:4096]).all()


def test_writes_of_a_writer_that_was_removed_are_refused(checked: Nodes) -> None:
    a, b = checked.joined("a", "b")
    b.open_window(a.peer)
    a.write(b.peer, ops((0, 0, 4096)))
    a.flush(b.peer)
    b.transport.remove_peer(a.peer)
    checked.pump_for(0.05)
    assert b.memory.max() == 0
