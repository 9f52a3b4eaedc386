"""Order, bounded queues, a receiver that stands still, and sleep."""

from __future__ import annotations

import time

import numpy as np
import psutil

from pd_serve.transport.base import NoticeReceived
from tests.contract.checks import sleep_until_event
from tests.patience import PATIENCE_S, idle_share
from tests.transport_nodes import Node, Nodes, ops

BIG_POOL = 4 << 20
CHUNK = 16 * 1024
NUM_OPS = 10_000
MAX_GROWTH_NBYTES = 48 << 20


def test_notices_arrive_in_order(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    sent = [b"%06d" % number + b"x" * (number % 900) for number in range(500)]
    for payload in sent:
        a.transport.notify(b.peer, payload)
    nodes.pump(lambda: len(b.notices()) >= len(sent), "all notices arrive")
    assert b.notices() == sent


def test_notices_of_several_peers_are_told_apart(nodes: Nodes) -> None:
    a, b, c = nodes.joined("a", "b", "c")
    for number in range(50):
        a.transport.notify(c.peer, b"a%d" % number)
        b.transport.notify(c.peer, b"b%d" % number)
    nodes.pump(lambda: len(c.notices()) == 100, "all notices arrive")
    for peer in (a.peer, b.peer):
        own = [event.payload for event in c.events if isinstance(event, NoticeReceived) and event.peer == peer]
        assert own == [b"%s%d" % (peer.worker_id.encode(), number) for number in range(50)]


def test_a_receiver_that_stands_still_delays_only_its_own_transfers(nodes: Nodes) -> None:
    """10,000 writes (160 MB) to a peer that takes no step: memory stays bounded, another peer is served, and all lands in the end."""
    a, still, other = nodes.joined("a", "b", "c", pool_nbytes=BIG_POOL)
    still.open_window(a.peer, 0, BIG_POOL)
    other.open_window(a.peer, 0, BIG_POOL)
    num_chunks = BIG_POOL // CHUNK
    rows = ops(*((index % num_chunks * CHUNK, (index * 7) % num_chunks * CHUNK, CHUNK) for index in range(NUM_OPS)))
    before = psutil.Process().memory_info().rss
    for first in range(0, NUM_OPS, 1000):
        a.write(still.peer, rows[first : first + 1000])
    token = a.flush(still.peer)
    nodes.pump_for(0.2, [a, other])
    assert psutil.Process().memory_info().rss - before < MAX_GROWTH_NBYTES

    a.write(other.peer, ops((0, 0, 65536)))
    assert nodes.flush(a, other.peer, [a, other]).ok, "though the one before it has not moved"
    assert np.array_equal(other.memory[:65536], a.memory[:65536])

    nodes.pump(lambda: a.flushed(token) is not None, "the stalled flush ends once the receiver moves")
    flushed = a.flushed(token)
    assert flushed is not None
    assert flushed.ok, flushed.detail
    chunks = a.memory.reshape(num_chunks, CHUNK)
    assert np.array_equal(still.memory.reshape(num_chunks, CHUNK)[np.arange(num_chunks) * 7 % num_chunks], chunks)


def test_a_sleeper_is_woken_by_what_arrives(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    sleep_until_event(b, [], len(b.events) + 1, 0.1)
    num_events = len(b.events)
    a.transport.notify(b.peer, b"wake up")
    started = time.monotonic()
    wakes = sleep_until_event(b, [a], num_events + 1, PATIENCE_S)
    assert b.notices() == [b"wake up"]
    assert wakes >= 1 or time.monotonic() - started < PATIENCE_S / 2


def test_a_sleeper_with_joined_peers_uses_next_to_nothing(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    nodes.pump_for(0.05)
    allowed = idle_share(0.04)
    for node in (a, b):
        assert any(_share_asleep(node) < allowed for _ in range(8))


def _share_asleep(node: Node) -> float:
    """Of one core, used by this process meanwhile: some windows hold a garbage collection."""
    started, before = time.monotonic(), time.process_time()
    assert sleep_until_event(node, [], len(node.events) + 1, 0.2) < 20
    return (time.process_time() - before) / (time.monotonic() - started)
