"""After an ok flush the bytes are there, and a record sent after it is handled after them."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import pytest

from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import PeerId
from pd_serve.transport.base import EventSink, Flushed, TransportSettings
from pd_serve.transport.fault_plan import FaultPlan
from pd_serve.transport.faulty import FaultyTransport
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from tests.contract.checks import check_notice_comes_after_bytes, check_visible_when_flushed
from tests.transport_nodes import POOL_NBYTES, Nodes, ops, peer_id


class EarlyFlush(LoopbackTransport):
    """PLANTED: says ok without asking the target."""

    def __init__(self, settings: TransportSettings, sink: EventSink, fabric: LoopbackFabric) -> None:
        super().__init__(settings, sink, fabric)
        self._promised: deque[Flushed] = deque()
        self._event_sink = sink

    def flush(self, peer: PeerId, token: int) -> None:
        self._promised.append(Flushed(token, True))

    def progress(self) -> bool:
        while self._promised:
            self._event_sink(self._promised.popleft())
        return super().progress()


def test_bytes_are_visible_when_the_flush_is_reported(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    check_visible_when_flushed(nodes, source, target)


def test_a_notice_is_handled_after_the_flushed_bytes_are_visible(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    check_notice_comes_after_bytes(nodes, source, target)


def test_the_suite_catches_a_flush_that_asks_nobody() -> None:
    nodes = Nodes(partial(EarlyFlush, fabric=LoopbackFabric()), "tcp", False)
    source, target = nodes.joined("a", "b")
    with pytest.raises(AssertionError):
        check_visible_when_flushed(nodes, source, target)
    nodes.close()


@pytest.mark.parametrize("lanes", ["shm", "tcp"])
@pytest.mark.parametrize("check", [check_visible_when_flushed, check_notice_comes_after_bytes])
def test_the_suite_catches_writes_that_land_after_their_flush(lanes: str, check: object) -> None:
    inner = partial(LoopbackTransport, fabric=LoopbackFabric())
    plan = FaultPlan(late_write=1.0, late_write_s=0.2)
    nodes = Nodes(partial(FaultyTransport, plan=plan, inner=inner), lanes, lanes == "shm")
    source, target = nodes.joined("a", "b")
    assert callable(check)
    with pytest.raises(AssertionError):
        check(nodes, source, target)
    nodes.close()


def test_both_directions_work_at_once(nodes: Nodes) -> None:
    a, b = nodes.joined("a", "b")
    half = POOL_NBYTES // 2
    a.open_window(b.peer, half)
    b.open_window(a.peer, half)
    b.memory[:half] = 9
    a.write(b.peer, ops((0, half, half)))
    b.write(a.peer, ops((0, half, half)))
    tokens = a.flush(b.peer), b.flush(a.peer)
    nodes.pump(lambda: a.flushed(tokens[0]) is not None and b.flushed(tokens[1]) is not None, "both flushes end")
    assert all(event.ok for node in (a, b) for event in node.of(Flushed) if isinstance(event, Flushed))
    assert np.array_equal(b.memory[half:], a.memory[:half])
    assert (a.memory[half:] == 9).all()


def test_every_flush_is_answered_exactly_once(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    target.open_window(source.peer)
    tokens = []
    for index in range(50):
        source.write(target.peer, ops((index * 1024, index * 1024, 1024)))
        tokens.append(source.flush(target.peer))
    nodes.pump(lambda: len(source.of(Flushed)) >= len(tokens), "all flushes end")
    nodes.pump_for(0.02)
    assert sorted(event.token for event in source.of(Flushed) if isinstance(event, Flushed)) == tokens


@pytest.mark.parametrize(
    "row",
    [
        (POOL_NBYTES - 8, 0, 9),
        (0, POOL_NBYTES - 8, 9),
        (0, 0, POOL_NBYTES + 1),
        (-1, 0, 8),
        (0, -1, 8),
        (0, 0, -8),
        (0, 1 << 62, 8),
        (0, (1 << 63) - 4, 8),
        (1 << 62, 0, 1 << 62),
    ],
)
def test_a_write_outside_either_pool_raises_before_anything_is_sent(nodes: Nodes, row: tuple[int, int, int]) -> None:
    source, target = nodes.joined("a", "b")
    target.open_window(source.peer)
    before = source.transport.counters().writes
    try:
        source.write(target.peer, ops((0, 0, 64), row, (64, 64, 64)))
    except OutOfBoundsError:
        pass
    else:
        # Only a transport that held the batch back may find the peer's bounds when it is its turn.
        assert isinstance(source.transport, FaultyTransport)
        assert not nodes.flush(source, target.peer).ok
    nodes.pump_for(0.01)
    assert source.transport.counters().writes == before
    assert target.memory.max() == 0


def test_an_empty_batch_is_nothing(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    source.write(target.peer, ops())
    assert nodes.flush(source, target.peer).ok
    assert target.memory.max() == 0


def test_written_bytes_are_counted(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    target.open_window(source.peer)
    before = source.transport.counters().bytes_written
    source.write(target.peer, ops((0, 0, 4096), (8192, 8192, 100)))
    assert nodes.flush(source, target.peer).ok
    assert source.transport.counters().bytes_written - before == 4196


def test_writes_and_flush_to_an_unknown_peer_end_badly(nodes: Nodes) -> None:
    (source,) = nodes.joined("a")
    stranger = peer_id("nobody")
    source.write(stranger, ops((0, 0, 64)))
    source.transport.notify(stranger, b"anyone?")
    assert not nodes.flush(source, stranger).ok
