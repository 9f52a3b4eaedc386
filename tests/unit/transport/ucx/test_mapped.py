"""Writing into mapped memory of a peer: the same bytes as puts, the same rules for what is delivered."""

from __future__ import annotations

import mmap

import numpy as np

from pd_serve.transport.native.ranges import LOCKED_NBYTES
from pd_serve.transport.ucx.mapped import POPULATE_NBYTES, MappedMemory
from pd_serve.transport.ucx.one_sided import OneSidedWriter, Side
from pd_serve.transport.ucx.seam import OK
from pd_serve.transport.ucx.writer import Completion
from tests.unit.transport.ucx.fake_endpoint import FakeEndpoint, FakeKey
from tests.unit.transport.ucx.test_one_sided import pieces

NBYTES = 4 * LOCKED_NBYTES


class Memories:
    """A source full of bytes, and a target of zeros in a shared mapping."""

    def __init__(self, target_nbytes: int = NBYTES) -> None:
        self.source = np.random.default_rng(1).integers(1, 256, NBYTES, np.uint8)
        self._backing = mmap.mmap(-1, target_nbytes)
        self.target = np.frombuffer(self._backing, np.uint8)
        self.mapped = MappedMemory(self.source.ctypes.data, NBYTES, self.target.ctypes.data, target_nbytes)

    def writer(self, endpoint: FakeEndpoint, is_alive: bool = True) -> OneSidedWriter:
        pool = Side(self.source.ctypes.data, None, 0, FakeKey(), self.mapped)
        return OneSidedWriter(endpoint, pool, Side(0, None, 0, FakeKey()), lambda: is_alive)


def test_pieces_short_and_long_land_where_they_belong_and_nowhere_else() -> None:
    memories = Memories()
    rows = ((0, 8, 24), (64, 4096, 0), (128, 1 << 16, LOCKED_NBYTES), (5, 1 << 17, LOCKED_NBYTES + 1))
    memories.mapped.write(np.array(rows, np.int64))
    wanted = np.zeros_like(memories.target)
    for local, remote, nbytes in rows:
        wanted[remote : remote + nbytes] = memories.source[local : local + nbytes]
    assert np.array_equal(memories.target, wanted)


def test_a_mapped_peer_is_written_without_a_put_and_flushed_by_the_library() -> None:
    memories, endpoint = Memories(), FakeEndpoint()
    made = memories.writer(endpoint)
    made.write(pieces((0, 0, NBYTES)))
    made.flush(1)
    made.pump()
    assert np.array_equal(memories.target, memories.source)
    assert endpoint.puts == []
    assert made.take_completions() == []
    endpoint.flushes[0].status = OK
    made.pump()
    assert made.take_completions() == [Completion(1, True, "")]
    assert (made.num_bytes, made.num_writes) == (NBYTES, 1)


def test_nothing_is_written_to_a_peer_whose_endpoint_has_failed() -> None:
    memories, endpoint = Memories(), FakeEndpoint()
    made = memories.writer(endpoint)
    endpoint.failure = "Connection reset by remote peer"
    made.write(pieces((0, 0, 64)))
    made.flush(1)
    made.pump()
    endpoint.flushes[0].status = OK
    made.pump()
    assert not memories.target.any()
    (completion,) = made.take_completions()
    assert not completion.ok


def test_stores_into_the_memory_of_a_dead_process_are_no_delivery() -> None:
    memories, endpoint = Memories(), FakeEndpoint()
    made = memories.writer(endpoint, is_alive=False)
    made.write(pieces((0, 0, 64)))
    made.flush(1)
    made.pump()
    endpoint.flushes[0].status = OK
    made.pump()
    assert made.take_completions() == [Completion(1, False, "the peer's process has ended")]


def test_pages_are_populated_while_nothing_else_is_to_be_done() -> None:
    memories, endpoint = Memories(3 * POPULATE_NBYTES), FakeEndpoint()
    made = memories.writer(endpoint)
    made.write(pieces((0, 0, 64)))
    made.pump()
    assert not memories.mapped.is_populated
    assert made.is_pending
    for _ in range(3):
        assert made.pump()
    assert memories.mapped.is_populated
    assert not made.is_pending
    assert not made.pump()
    assert np.count_nonzero(memories.target) == 64


def test_a_writer_that_was_closed_touches_neither_memory() -> None:
    memories, endpoint = Memories(), FakeEndpoint()
    made = memories.writer(endpoint)
    endpoint.close()
    made.close()
    made.write(pieces((0, 0, 64)))
    made.pump()
    assert not memories.target.any()
    assert not made.is_pending
