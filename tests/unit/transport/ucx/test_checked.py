"""Bytes as messages: packing, back-pressure, and flushes that only the target can answer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import pytest

from pd_serve.ids import Epoch, LeaseId
from pd_serve.transport.ucx.checked import MAX_INFLIGHT_NBYTES, NUM_SLOTS, PACK_NBYTES, CheckedWriter, Inbound, Source
from pd_serve.transport.ucx.messages import TOKEN_NBYTES, FlushReply, FlushRequest, decode_data_header
from pd_serve.transport.ucx.seam import OK
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES, Completion, Pieces
from tests.unit.transport.ucx.fake_endpoint import FakeEndpoint

POOL_NBYTES = 8 << 20


class Bench:
    """A writer over a fake endpoint, its pool, and the flush requests it sent."""

    def __init__(self, sends_are_inline: bool = True, can_gather: bool = True, kind: type[CheckedWriter] = CheckedWriter) -> None:
        self.pool = ctypes.create_string_buffer(bytes(range(256)) * (POOL_NBYTES // 256), POOL_NBYTES)
        self.endpoint = FakeEndpoint(sends_are_inline=sends_are_inline)
        self.requests: list[FlushRequest] = []
        source = Source(ctypes.addressof(self.pool), ctypes.addressof(self.pool), can_gather)
        self.source = source
        self.writer = kind(self.endpoint, b"t" * TOKEN_NBYTES, 1, source, self.requests.append)

    def stage(self, staging: FakeStaging) -> None:
        """From now on the pool's bytes pass through it."""
        source = self.source._replace(staging=staging)
        self.writer = CheckedWriter(self.endpoint, b"t" * TOKEN_NBYTES, 1, source, self.requests.append)

    def write(self, *rows: tuple[int, int, int]) -> None:
        self.writer.write(Pieces(LeaseId(4), Epoch(5), np.array(rows, np.int64)))
        self.writer.pump()

    def landed(self) -> bytes:
        """What a target would hold."""
        target = bytearray(POOL_NBYTES)
        for _, header, payload in self.endpoint.sent:
            position = 0
            for offset, nbytes in decode_data_header(header, len(payload)).pieces.tolist():
                target[offset : offset + nbytes] = payload[position : position + nbytes]
                position += nbytes
        return bytes(target)


def test_small_scattered_pieces_travel_together_and_land_where_they_belong() -> None:
    bench = Bench()
    rows = [(index * 6144, POOL_NBYTES - (index + 1) * 10_000, 6144) for index in range(100)]
    bench.write(*rows)
    assert len(bench.endpoint.sent) == -(-100 * 6144 // (PACK_NBYTES // 6144 * 6144))
    landed = bench.landed()
    for local, remote, nbytes in rows:
        assert landed[remote : remote + nbytes] == bench.pool.raw[local : local + nbytes]


def test_large_pieces_are_cut_and_travel_alone() -> None:
    bench = Bench()
    bench.write((0, 0, 3 * MAX_PIECE_NBYTES + 5), (5, 2 << 20, 10))
    assert [len(payload) for _, _, payload in bench.endpoint.sent] == [MAX_PIECE_NBYTES] * 3 + [15]


def test_nothing_is_gathered_from_memory_that_cannot_be_read() -> None:
    bench = Bench(can_gather=False)
    bench.write(*((index * 100, index * 100, 100) for index in range(10)))
    assert len(bench.endpoint.sent) == 10


def test_a_peer_that_does_not_read_holds_a_bounded_number_of_bytes() -> None:
    bench = Bench(sends_are_inline=False)
    for _ in range(20):
        bench.write((0, 0, 1 << 20))
    sent = sum(len(payload) for _, _, payload in bench.endpoint.sent)
    assert sent <= MAX_INFLIGHT_NBYTES + MAX_PIECE_NBYTES
    for request in bench.endpoint.sends:
        request.status = OK
    bench.writer.pump()
    assert sum(len(payload) for _, _, payload in bench.endpoint.sent) > sent


class Hasty(CheckedWriter):
    """PLANTED: what has left this process counts as delivered."""

    def flush(self, token: int) -> None:
        self._completions.append(Completion(token, True, ""))


def check_only_the_targets_answer_ends_a_flush(kind: type[CheckedWriter]) -> None:
    bench = Bench(kind=kind)
    bench.write((0, 0, 100))
    bench.writer.flush(9)
    bench.writer.pump()
    assert bench.writer.take_completions() == []
    assert [request.num_messages for request in bench.requests] == [1]
    bench.writer.on_reply(FlushReply(bench.requests[0].seq, 0))
    assert bench.writer.take_completions() == [Completion(9, True, "")]


def test_only_the_targets_answer_ends_a_flush() -> None:
    check_only_the_targets_answer_ends_a_flush(CheckedWriter)


def test_the_check_catches_a_writer_that_does_not_wait() -> None:
    with pytest.raises(AssertionError):
        check_only_the_targets_answer_ends_a_flush(Hasty)


def test_a_broken_window_fails_the_flush_and_a_strange_reply_is_nothing() -> None:
    bench = Bench()
    bench.write((0, 0, 100))
    bench.writer.flush(9)
    bench.writer.pump()
    bench.writer.on_reply(FlushReply(77, 0))
    bench.writer.on_reply(FlushReply(bench.requests[0].seq, 1))
    bench.writer.on_reply(FlushReply(bench.requests[0].seq, 0))
    (completion,) = bench.writer.take_completions()
    assert not completion.ok


def test_aborting_ends_queued_and_awaited_flushes_once() -> None:
    bench = Bench(sends_are_inline=False)
    bench.writer.flush(1)
    bench.writer.pump()
    for _ in range(4):
        bench.write((0, 0, 1 << 20))
    bench.writer.flush(2)
    bench.writer.abort("gone")
    assert bench.writer.take_completions() == [Completion(1, False, "gone"), Completion(2, False, "gone")]
    bench.writer.on_reply(FlushReply(1, 0))
    assert bench.writer.take_completions() == []


def test_a_flush_that_overtakes_its_data_waits_for_it() -> None:
    inbound = Inbound()
    inbound.handled(1, is_violation=False)
    inbound.on_flush(FlushRequest(1, 1, 2))
    assert inbound.replies() == []
    inbound.handled(1, is_violation=False)
    assert inbound.replies() == [FlushReply(1, 0)]
    assert inbound.replies() == []


def test_messages_of_an_earlier_endpoint_do_not_count_for_a_later_one() -> None:
    inbound = Inbound()
    for _ in range(5):
        inbound.handled(1, is_violation=True)
    inbound.on_flush(FlushRequest(1, 2, 2))
    assert inbound.replies() == []
    inbound.handled(2, is_violation=False)
    inbound.handled(1, is_violation=False)
    assert inbound.replies() == []
    inbound.handled(2, is_violation=False)
    assert inbound.replies() == [FlushReply(1, 0)]


def test_violations_are_told_once() -> None:
    inbound = Inbound()
    inbound.handled(1, is_violation=True)
    inbound.on_flush(FlushRequest(1, 1, 1))
    inbound.on_flush(FlushRequest(2, 1, 1))
    assert inbound.replies() == [FlushReply(1, 1), FlushReply(2, 0)]


class FakeStaging:
    """Slots in host memory that is filled by memmove, as pinned memory is by the device."""

    def __init__(self, num_slots: int) -> None:
        self.slot_nbytes = MAX_PIECE_NBYTES
        self.memory = ctypes.create_string_buffer(num_slots * self.slot_nbytes)
        self.free = [ctypes.addressof(self.memory) + index * self.slot_nbytes for index in range(num_slots)]

    def take(self) -> int | None:
        return self.free.pop() if self.free else None

    def gather(self, slot: int, pieces: Iterable[tuple[int, int]]) -> int:
        copied = 0
        for address, nbytes in pieces:
            assert copied + nbytes <= self.slot_nbytes
            ctypes.memmove(slot + copied, address, nbytes)
            copied += nbytes
        return copied

    def give_back(self, slot: int) -> None:
        assert slot not in self.free
        self.free.append(slot)


def test_a_pool_that_cannot_be_read_goes_through_staging_in_few_messages() -> None:
    bench = Bench(can_gather=False)
    bench.stage(FakeStaging(NUM_SLOTS))
    rows = [(index * 6144, POOL_NBYTES - (index + 1) * 10_000, 6144) for index in range(100)]
    bench.write(*rows, (0, 0, MAX_PIECE_NBYTES + 9))
    assert len(bench.endpoint.sent) == -(-100 * 6144 // (PACK_NBYTES // 6144 * 6144)) + 2
    landed = bench.landed()
    for local, remote, nbytes in rows[:-1]:
        assert landed[remote : remote + nbytes] == bench.pool.raw[local : local + nbytes]


def test_slots_are_bounded_and_come_back_with_their_messages() -> None:
    bench = Bench(sends_are_inline=False, can_gather=False)
    staging = FakeStaging(NUM_SLOTS)
    bench.stage(staging)
    for _ in range(3 * NUM_SLOTS):
        bench.write((0, 0, PACK_NBYTES // 2))
    assert len(bench.endpoint.sent) == NUM_SLOTS
    assert bench.writer.is_pending
    for _ in range(3):
        for request in bench.endpoint.sends:
            request.status = OK
        bench.writer.pump()
    assert len(bench.endpoint.sent) == 3 * NUM_SLOTS
    assert len(staging.free) == NUM_SLOTS


def test_a_probe_does_not_pass_through_staging() -> None:
    bench = Bench(can_gather=False)
    bench.stage(FakeStaging(0))
    bench.writer.probe(5000)
    bench.writer.pump()
    assert [len(payload) for _, _, payload in bench.endpoint.sent] == [5000]
