"""KV is taken for what was sent only if its digest is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pd_serve.ids import AttemptId, Epoch, LeaseId, PeerId
from pd_serve.kv.digest import KVDigest, TokenSpan
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import WriteWindow
from tests.machine_fakes import peer_id
from workers.decode.arrivals import Arrivals

LAYOUT = KVLayout(2, 2, 4, 4, 8, KVDtype.FLOAT16)
SPAN = TokenSpan((6, 1, 3), 4, 11)
"""Block 6 is cached, of block 3 the last token is not written."""
WRITER, OTHER = peer_id("prefill"), peer_id("prefill#1")
NOWHERE = np.empty(0, np.int64)


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, LAYOUT.pool_nbytes, np.uint8)


def arrivals_of(memory: NDArray[np.uint8], *others: PeerId) -> Arrivals:
    arrivals = Arrivals(memory, LAYOUT)
    arrivals.expect(WriteWindow(LeaseId(1), Epoch(5), WRITER, NOWHERE, NOWHERE, others), SPAN)
    return arrivals


def record(digest: bytes, lease_id: int = 1, epoch: int = 5) -> Completed:
    return Completed(LeaseId(lease_id), Epoch(epoch), AttemptId(1), 0, 1, 3, None, 11, 2, 0, 0, 0.0, digest)


def sent(memory: NDArray[np.uint8], heads: range | None = None) -> bytes:
    digest = KVDigest()
    for layer in range(LAYOUT.num_layers):
        digest.add_pool(memory, LAYOUT, SPAN, layer, heads)
    return digest.to_bytes()


def test_what_was_sent_is_no_damage(memory: NDArray[np.uint8]) -> None:
    arrivals = arrivals_of(memory)
    assert arrivals.damage(WRITER, record(sent(memory))) == ""
    arrivals.forget(LeaseId(1))
    assert len(arrivals) == 0


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("block", [1, 3])
def test_a_changed_byte_is_damage(memory: NDArray[np.uint8], layer: int, block: int) -> None:
    digest = sent(memory)
    memory[LAYOUT.block_offset(layer, block) + 3] ^= 0x10
    assert "not the KV that was sent" in arrivals_of(memory).damage(WRITER, record(digest))


def test_what_was_not_to_be_written_is_not_looked_at(memory: NDArray[np.uint8]) -> None:
    digest = sent(memory)
    for offset in (LAYOUT.block_offset(0, 6), LAYOUT.block_offset(1, 0), LAYOUT.block_offset(0, 3) + 3 * LAYOUT.token_nbytes):
        memory[offset] ^= 0xFF
    assert arrivals_of(memory).damage(WRITER, record(digest)) == ""


def test_a_writer_that_does_not_verify_is_found_out(memory: NDArray[np.uint8]) -> None:
    assert "transport.verify is not set" in arrivals_of(memory).damage(WRITER, record(b""))


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_of_several_writers_the_last_carries_the_verdict(memory: NDArray[np.uint8], is_spoilt: bool) -> None:
    first, second = (sent(memory, range(head, head + 1)) for head in (0, 1))
    arrivals = arrivals_of(memory, OTHER)
    memory[LAYOUT.block_offset(1, 1)] ^= is_spoilt
    assert arrivals.damage(OTHER, record(second)) == ""
    assert bool(arrivals.damage(WRITER, record(first))) is is_spoilt


@pytest.mark.parametrize(("peer", "lease_id", "epoch"), [(peer_id("other"), 1, 5), (WRITER, 2, 5), (WRITER, 1, 6)])
def test_a_record_that_is_nobodys_is_left_to_the_lease_table(memory: NDArray[np.uint8], peer: PeerId, lease_id: int, epoch: int) -> None:
    arrivals = arrivals_of(memory)
    assert arrivals.damage(peer, record(b"rubbish!", lease_id, epoch)) == ""
    assert arrivals.damage(WRITER, record(sent(memory))) == ""
