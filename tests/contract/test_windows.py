"""The checked path: nothing lands without a live window of that lease, epoch, writer and range."""

from __future__ import annotations

import pytest

from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import Epoch, LeaseId
from tests.transport_nodes import EPOCH, LEASE, POOL_NBYTES, Node, Nodes, ops

ROW = ops((0, 4096, 4096))


def refused(nodes: Nodes, source: Node, target: Node) -> int:
    """Flush whatever the answer, and say how many writes the target has refused."""
    nodes.flush(source, target.peer)
    return target.transport.counters().refused_writes


def test_a_write_without_a_window_is_dropped_and_counted(checked: Nodes) -> None:
    source, target = checked.joined("a", "b")
    source.write(target.peer, ROW)
    assert refused(checked, source, target) == 1
    assert target.memory.max() == 0


@pytest.mark.parametrize(("lease", "epoch"), [(LEASE + 1, EPOCH), (LEASE, EPOCH + 1)])
def test_a_write_of_another_lease_or_epoch_is_dropped_and_counted(checked: Nodes, lease: int, epoch: int) -> None:
    source, target = checked.joined("a", "b")
    target.open_window(source.peer)
    source.write(target.peer, ROW, LeaseId(lease), Epoch(epoch))
    assert refused(checked, source, target) == 1
    assert target.memory.max() == 0


def test_a_write_of_another_writer_is_dropped_and_counted(checked: Nodes) -> None:
    source, target, intruder = checked.joined("a", "b", "c")
    intruder.memory[:] = 1
    target.open_window(source.peer)
    intruder.write(target.peer, ROW)
    assert refused(checked, intruder, target) == 1
    assert target.memory.max() == 0


def test_several_ranks_of_a_writer_share_a_window_and_its_end_fences_them_all(checked: Nodes) -> None:
    source, target, other, stranger = checked.joined("a", "b", "a#1", "c")
    for node in (other, stranger):
        node.memory[:] = 7
    target.open_window(source.peer, other_writers=(other.peer,))
    source.write(target.peer, ROW)
    other.write(target.peer, ops((0, 16384, 4096)))
    assert refused(checked, source, target) == 0
    assert refused(checked, other, target) == 0
    stranger.write(target.peer, ops((0, 32768, 4096)))
    assert refused(checked, stranger, target) == 1
    assert (target.memory[4096:8192] == source.memory[:4096]).all()
    assert (target.memory[16384:20480] == 7).all()
    assert target.memory[32768:36864].max() == 0
    assert target.transport.close_window(LEASE)
    other.write(target.peer, ops((0, 65536, 4096)))
    assert refused(checked, other, target) == 2
    assert target.memory[65536:69632].max() == 0


def test_closing_a_window_is_a_complete_fence(checked: Nodes) -> None:
    source, target = checked.joined("a", "b")
    target.open_window(source.peer)
    source.write(target.peer, ROW)
    token = source.flush(target.peer)
    checked.pump_for(0.02, [source])
    # Whatever has been sent and not handled must not land any more.
    landed_before = target.memory.copy()
    assert target.transport.close_window(LEASE)
    source.write(target.peer, ops((0, 65536, 4096)))
    checked.pump(lambda: source.flushed(token) is not None, "the flush ends")
    refused(checked, source, target)
    assert (target.memory == landed_before).all()
    assert target.transport.counters().refused_writes > 0


def test_closing_twice_or_what_never_was_does_no_harm(nodes: Nodes) -> None:
    source, target = nodes.joined("a", "b")
    target.open_window(source.peer)
    assert target.transport.close_window(LEASE) is not nodes.one_sided
    target.transport.close_window(LEASE)
    target.transport.close_window(LeaseId(12345))


@pytest.mark.parametrize("row", [(0, 4095, 10), (0, 8190, 3), (0, 0, 16), (0, 4096, 4097), (0, 12287, 2)])
def test_bytes_outside_the_window_are_refused_and_the_flush_says_so(checked: Nodes, row: tuple[int, int, int]) -> None:
    source, target = checked.joined("a", "b")
    target.open_window(source.peer, 4096, 8192)
    source.write(target.peer, ops(row))
    assert not checked.flush(source, target.peer).ok
    assert target.transport.counters().refused_writes == 1
    assert target.memory.max() == 0


def test_the_whole_window_may_be_written(checked: Nodes) -> None:
    source, target = checked.joined("a", "b")
    target.open_window(source.peer, 4096, 8192)
    source.write(target.peer, ops((0, 4096, 4096)))
    assert checked.flush(source, target.peer).ok
    assert (target.memory[4096:8192] == source.memory[:4096]).all()
    assert target.memory[:4096].max() == 0
    assert target.memory[8192:].max() == 0
    assert target.transport.counters().refused_writes == 0


def test_stale_writes_of_one_lease_do_not_fail_another(checked: Nodes) -> None:
    """A cancelled attempt's tail must not take down the attempts beside it."""
    source, target = checked.joined("a", "b")
    target.open_window(source.peer, lease=LeaseId(2))
    source.write(target.peer, ROW, LeaseId(1))
    source.write(target.peer, ROW, LeaseId(2))
    assert checked.flush(source, target.peer).ok
    assert target.transport.counters().refused_writes == 1
    assert (target.memory[4096:8192] == source.memory[:4096]).all()


def test_a_second_window_of_a_lease_replaces_the_first(checked: Nodes) -> None:
    source, target = checked.joined("a", "b")
    target.open_window(source.peer, 0, 4096)
    target.open_window(source.peer, 4096, 8192, epoch=Epoch(EPOCH + 1))
    source.write(target.peer, ROW, epoch=Epoch(EPOCH + 1))
    assert checked.flush(source, target.peer).ok
    assert (target.memory[4096:8192] == source.memory[:4096]).all()


def test_a_window_outside_the_pool_is_an_error(checked: Nodes) -> None:
    source, target = checked.joined("a", "b")
    with pytest.raises(OutOfBoundsError):
        target.open_window(source.peer, 0, POOL_NBYTES + 1)
