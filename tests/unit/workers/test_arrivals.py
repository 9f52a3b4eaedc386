"""KV is taken for what was sent only if its digest is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pd_serve.ids import AttemptId, Epoch, LeaseId, PeerId
from pd_serve.kv.digest import KVDigest
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import WriteWindow
from tests.machine_fakes import peer_id
from workers.decode.arrivals import Arrivals

WRITER = peer_id("prefill")
STARTS, ENDS = np.array([8, 300]), np.array([200, 1000])


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, 1024, np.uint8)


def arrivals_of(memory: NDArray[np.uint8]) -> Arrivals:
    arrivals = Arrivals(memory)
    arrivals.expect(WriteWindow(LeaseId(1), Epoch(5), WRITER, STARTS, ENDS))
    return arrivals


def record(digest: bytes, lease_id: int = 1, epoch: int = 5) -> Completed:
    return Completed(LeaseId(lease_id), Epoch(epoch), AttemptId(1), 0, 1, 3, None, 4, 2, 892, 0, 0.0, digest)


def sent(memory: NDArray[np.uint8]) -> bytes:
    digest = KVDigest(memory)
    digest.add(np.column_stack((STARTS, STARTS, ENDS - STARTS)))
    return digest.to_bytes()


def test_what_was_sent_is_no_damage(memory: NDArray[np.uint8]) -> None:
    arrivals = arrivals_of(memory)
    assert arrivals.damage(WRITER, record(sent(memory))) == ""
    arrivals.forget(LeaseId(1))
    assert len(arrivals) == 0


@pytest.mark.parametrize("at", [8, 199, 300, 999])
def test_a_changed_byte_is_damage(memory: NDArray[np.uint8], at: int) -> None:
    digest = sent(memory)
    memory[at] ^= 0x10
    assert "not the KV that was sent" in arrivals_of(memory).damage(WRITER, record(digest))


def test_what_lies_beside_the_window_is_not_looked_at(memory: NDArray[np.uint8]) -> None:
    digest = sent(memory)
    memory[[7, 200, 299, 1000]] ^= 0xFF
    assert arrivals_of(memory).damage(WRITER, record(digest)) == ""


def test_a_writer_that_does_not_verify_is_found_out(memory: NDArray[np.uint8]) -> None:
    assert "transport.verify is not set" in arrivals_of(memory).damage(WRITER, record(b""))


def test_of_several_writers_the_last_carries_the_verdict(memory: NDArray[np.uint8]) -> None:
    other = peer_id("prefill#1")
    window = WriteWindow(LeaseId(1), Epoch(5), WRITER, STARTS, ENDS, (other,))
    shares = [KVDigest(memory), KVDigest(memory)]
    for index, first in enumerate((8, 104, 300)):
        shares[index % 2].add(np.array([(first, first, 96 if first < 200 else 700)]))
    for is_spoilt in (False, True):
        arrivals = Arrivals(memory)
        arrivals.expect(window)
        assert arrivals.damage(other, record(shares[1].to_bytes())) == ""
        memory[150] ^= is_spoilt
        assert bool(arrivals.damage(WRITER, record(shares[0].to_bytes()))) is is_spoilt


@pytest.mark.parametrize(("peer", "lease_id", "epoch"), [(peer_id("other"), 1, 5), (WRITER, 2, 5), (WRITER, 1, 6)])
def test_a_record_that_is_nobodys_is_left_to_the_lease_table(memory: NDArray[np.uint8], peer: PeerId, lease_id: int, epoch: int) -> None:
    arrivals = arrivals_of(memory)
    assert arrivals.damage(peer, record(b"rubbish!", lease_id, epoch)) == ""
    assert arrivals.damage(WRITER, record(sent(memory))) == ""
