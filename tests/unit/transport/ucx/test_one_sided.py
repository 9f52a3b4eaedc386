"""Puts: what counts as delivered, what is issued when."""

from __future__ import annotations

import numpy as np
import pytest

from pd_serve.ids import Epoch, LeaseId
from pd_serve.transport.ucx.one_sided import MAX_PUMP_NBYTES, MAX_UNFLUSHED_PUTS, OneSidedWriter, Side
from pd_serve.transport.ucx.seam import OK
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES, Completion, Pieces
from tests.unit.transport.ucx.fake_endpoint import FakeEndpoint, FakeKey


def writer(endpoint: FakeEndpoint, is_alive: bool = True) -> OneSidedWriter:
    return OneSidedWriter(endpoint, Side(1000, None, 5000, FakeKey()), Side(0, None, 0, FakeKey()), lambda: is_alive)


def pieces(*rows: tuple[int, int, int]) -> Pieces:
    return Pieces(LeaseId(1), Epoch(1), np.array(rows, np.int64))


class Trusting(OneSidedWriter):
    """PLANTED: the flush's own word is enough."""

    def _collect(self) -> bool:
        while self._flushes and self._flushes[0][1].poll() == OK:
            self._completions.append(Completion(self._flushes.popleft()[0] or 0, True, ""))
        return True


def check_ok_flush_of_a_failed_endpoint_is_no_delivery(kind: type[OneSidedWriter]) -> None:
    """F40: the target closed by force; UCX completes queued puts and the flush with OK."""
    endpoint = FakeEndpoint(puts_are_inline=False)
    made = kind(endpoint, Side(1000, None, 5000, FakeKey()), Side(0, None, 0, FakeKey()), lambda: True)
    made.write(pieces((0, 0, 64)))
    made.flush(1)
    made.pump()
    endpoint.failure = "Connection reset by remote peer"
    endpoint.flushes[0].status = OK
    made.pump()
    (completion,) = made.take_completions()
    assert not completion.ok


def test_an_ok_flush_of_a_failed_endpoint_is_no_delivery() -> None:
    check_ok_flush_of_a_failed_endpoint_is_no_delivery(OneSidedWriter)


def test_the_check_catches_a_writer_that_trusts_the_flush() -> None:
    with pytest.raises(AssertionError):
        check_ok_flush_of_a_failed_endpoint_is_no_delivery(Trusting)


def test_an_ok_flush_into_the_memory_of_a_dead_process_is_no_delivery() -> None:
    endpoint = FakeEndpoint()
    made = writer(endpoint, is_alive=False)
    made.write(pieces((0, 0, 64)))
    made.flush(1)
    made.pump()
    endpoint.flushes[0].status = OK
    made.pump()
    assert made.take_completions() == [Completion(1, False, "the peer's process has ended")]


def test_flushes_complete_in_order_and_speak_of_what_came_before() -> None:
    endpoint = FakeEndpoint()
    made = writer(endpoint)
    made.write(pieces((8, 16, 64), (100, 200, 4)))
    made.flush(1)
    made.flush(2)
    made.pump()
    assert endpoint.puts == [(1008, 5016, 64), (1100, 5200, 4)]
    endpoint.flushes[1].status = OK
    made.pump()
    assert made.take_completions() == []
    endpoint.flushes[0].status = OK
    made.pump()
    assert made.take_completions() == [Completion(1, True, ""), Completion(2, True, "")]
    assert not made.is_pending
    assert (made.num_bytes, made.num_writes) == (68, 2)


def test_a_long_batch_is_issued_over_several_pumps_in_order() -> None:
    endpoint = FakeEndpoint()
    made = writer(endpoint)
    made.write(pieces((0, 0, 3 * MAX_PUMP_NBYTES)))
    made.flush(1)
    made.pump()
    assert sum(nbytes for _, _, nbytes in endpoint.puts) == MAX_PUMP_NBYTES
    assert max(nbytes for _, _, nbytes in endpoint.puts) == MAX_PIECE_NBYTES
    assert endpoint.flushes == []
    while not endpoint.flushes:
        made.pump()
    assert [local for local, _, _ in endpoint.puts] == list(range(1000, 1000 + 3 * MAX_PUMP_NBYTES, MAX_PIECE_NBYTES))


def test_queued_puts_are_bounded_by_a_flush_of_its_own() -> None:
    endpoint = FakeEndpoint(puts_are_inline=False)
    made = writer(endpoint)
    made.write(pieces(*((index, index, 1) for index in range(3 * MAX_UNFLUSHED_PUTS))))
    made.flush(1)
    for _ in range(10):
        made.pump()
    assert len(endpoint.puts) == MAX_UNFLUSHED_PUTS
    for _ in range(10):
        for flush in endpoint.flushes:
            flush.status = OK
        made.pump()
    assert len(endpoint.puts) == 3 * MAX_UNFLUSHED_PUTS
    assert made.take_completions() == [Completion(1, True, "")]


def test_aborting_ends_every_flush_once() -> None:
    endpoint = FakeEndpoint()
    made = writer(endpoint)
    made.flush(1)
    made.pump()
    made.write(pieces((0, 0, 2 * MAX_PUMP_NBYTES)))
    made.flush(2)
    made.pump()
    made.abort("gone")
    made.pump()
    assert made.take_completions() == [Completion(1, False, "gone"), Completion(2, False, "gone")]
    assert endpoint.flushes[0].is_released
    assert not made.is_pending
