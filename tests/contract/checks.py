"""What is asked of every transport as functions, so that planted transports can be shown to fail them."""

from __future__ import annotations

import select
import time

import numpy as np

from pd_serve.transport.base import Flushed, NoticeReceived, TransportEvent
from tests.transport_nodes import POOL_NBYTES, Node, Nodes, ops

CHUNK = 1024
SCATTERED = ops(*((index * CHUNK, ((index * 37) % 1024) * CHUNK, CHUNK) for index in range(POOL_NBYTES // CHUNK)))
"""Every chunk of the writer's pool to another place of the target's."""


def holds_scattered(source: Node, target: Node) -> bool:
    return bool(np.array_equal(source.memory.reshape(-1, CHUNK), target.memory.reshape(-1, CHUNK)[SCATTERED[:, 1] // CHUNK]))


def check_visible_when_flushed(nodes: Nodes, source: Node, target: Node) -> None:
    """At the moment Flushed(ok=True) is reported, all bytes are there: while the target sleeps, and while it works."""
    verdicts: list[bool] = []

    def look(event: TransportEvent) -> None:
        if isinstance(event, Flushed) and event.ok:
            verdicts.append(holds_scattered(source, target))

    target.open_window(source.peer)
    source.watchers.append(look)
    source.write(target.peer, SCATTERED)
    token = source.flush(target.peer)
    nodes.pump_for(0.05, [source])
    nodes.pump(lambda: source.flushed(token) is not None, "the flush ends")
    flushed = source.flushed(token)
    assert flushed is not None
    assert flushed.ok, flushed.detail
    assert verdicts == [True]


def check_notice_comes_after_bytes(nodes: Nodes, source: Node, target: Node, rounds: int = 8) -> None:
    """Each round writes other bytes, flushes and only then notifies; at the moment the notice is handled the bytes are those."""
    verdicts: list[bool] = []

    def look(event: TransportEvent) -> None:
        if isinstance(event, NoticeReceived):
            verdicts.append(holds_scattered(source, target))

    target.open_window(source.peer)
    target.watchers.append(look)
    for number in range(rounds):
        source.memory[:] = np.random.default_rng(number).integers(0, 256, POOL_NBYTES, np.uint8)
        source.write(target.peer, SCATTERED)
        # The target gets its turns, but the writer decides by its own flush alone.
        assert nodes.flush(source, target.peer).ok
        source.transport.notify(target.peer, b"round %d" % number)
        nodes.pump(lambda number=number: len(verdicts) > number, f"notice {number} arrives")
    assert verdicts == [True] * rounds
    assert target.notices() == [b"round %d" % number for number in range(rounds)]


def sleep_until_event(node: Node, others: list[Node], num_events: int, timeout_s: float) -> int:
    """Drive `node` by the arm/wait_fds protocol only, the others freely, until it has that many events; returns how often it woke."""
    deadline = time.monotonic() + timeout_s
    wakes = 0
    while len(node.events) < num_events and time.monotonic() < deadline:
        happened = node.transport.progress()
        for other in others:
            other.transport.progress()
        if happened or node.transport.busy() or not node.transport.arm():
            continue
        poll = select.poll()
        for descriptor in node.transport.wait_fds():
            poll.register(descriptor, select.POLLIN)
        until = min(deadline, node.transport.next_deadline() or deadline)
        if others:
            until = min(until, time.monotonic() + 0.001)
        wakes += 1 if poll.poll(max(0.0, until - time.monotonic()) * 1000) else 0
    return wakes
