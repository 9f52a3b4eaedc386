"""Digests, tokens and the forms of messages; nothing but a ProtocolError comes of rubbish."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.errors import IncompatibleError, ProtocolError
from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.messages import (
    DIGEST_NBYTES,
    MAX_PIECES,
    NONCE_NBYTES,
    TOKEN_NBYTES,
    WIRE_VERSION,
    Answer,
    Hello,
    JoinCodec,
    MemoryOffer,
    Refusal,
    decode_data_header,
    encode_data_header,
    session_codec,
)
from pd_serve.transport.ucx.metadata import LaneAddress, MetadataCodec, UcxMetadata
from pd_serve.transport.ucx.process import ProcessIdentity
from pd_serve.transport.ucx.seam import MAX_HEADER_NBYTES

A = PeerId(WorkerId("a"), Incarnation(1))
B = PeerId(WorkerId("b"), Incarnation(2))
NONCE_A, NONCE_B = b"a" * NONCE_NBYTES, b"b" * NONCE_NBYTES
PROCESS = ProcessIdentity(1234, 5678)
TOKEN = b"t" * TOKEN_NBYTES


def hello(nonce: bytes = NONCE_A, **changes: object) -> Hello:
    made = Hello(A, B, nonce, WIRE_VERSION, "1.22.0", 1 << 20, "tcp", PROCESS, b"address")
    return msgspec.structs.replace(made, **changes)


def answer() -> Answer:
    return Answer(B, A, NONCE_B, NONCE_A, MemoryOffer(4096, 1 << 20, b"key"), MemoryOffer(0, 4096, b""))


@pytest.mark.parametrize("message", [hello(), answer(), Refusal(B, NONCE_A, "no")])
def test_a_signed_message_comes_back_authentic(message: Hello | Answer | Refusal) -> None:
    codec = JoinCodec(b"secret")
    assert codec.decode(codec.encode(message)) == (message, True)


def test_another_secret_is_not_authentic() -> None:
    assert JoinCodec(b"other").decode(JoinCodec(b"secret").encode(hello())) == (hello(), False)


@given(st.data())
def test_no_changed_bit_stays_authentic(data: st.DataObject) -> None:
    codec = JoinCodec(b"secret")
    signed = bytearray(codec.encode(hello()))
    position = data.draw(st.integers(0, len(signed) - 1))
    signed[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        _, is_authentic = codec.decode(bytes(signed))
    except ProtocolError:
        return
    assert not is_authentic


@given(st.binary(max_size=400))
def test_rubbish_is_a_protocol_error_and_nothing_else(rubbish: bytes) -> None:
    for decode in (
        JoinCodec(b"secret").decode,
        lambda data: JoinCodec(b"secret").decode(b"\0" * DIGEST_NBYTES + data),
        session_codec().decode,
        MetadataCodec(b"secret").decode,
        lambda data: decode_data_header(data, 4096),
    ):
        with suppress(ProtocolError):
            decode(rubbish)


def test_a_nonce_of_another_length_is_refused() -> None:
    codec = JoinCodec(b"secret")
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(hello(nonce=b"short")))


def test_a_token_depends_on_secret_direction_and_both_nonces() -> None:
    codec = JoinCodec(b"secret")
    token = codec.session_token(A, B, NONCE_A, NONCE_B)
    others = [
        codec.session_token(B, A, NONCE_A, NONCE_B),
        codec.session_token(B, A, NONCE_B, NONCE_A),
        codec.session_token(A, B, NONCE_B, NONCE_A),
        codec.session_token(A, B, NONCE_A, b"c" * NONCE_NBYTES),
        JoinCodec(b"other").session_token(A, B, NONCE_A, NONCE_B),
    ]
    assert len(token) == TOKEN_NBYTES
    assert token not in others
    assert len(set(others)) == len(others)


@given(st.integers(-1, (1 << 63) - 1), st.integers(0, (1 << 63) - 1), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=MAX_PIECES))
def test_a_data_header_comes_back(lease: int, epoch: int, sizes: list[int]) -> None:
    pieces = [number for index, size in enumerate(sizes) for number in (index << 32, size)]
    header = encode_data_header(TOKEN, LeaseId(lease), Epoch(epoch), 3, pieces)
    assert len(header) < MAX_HEADER_NBYTES
    decoded = decode_data_header(header, sum(sizes))
    assert (decoded.token, decoded.lease_id, decoded.epoch, decoded.stream) == (TOKEN, lease, epoch, 3)
    assert decoded.pieces.ravel().tolist() == pieces


def test_a_data_header_must_match_its_payload() -> None:
    header = encode_data_header(TOKEN, LeaseId(1), Epoch(1), 1, [0, 100])
    for wrong in (0, 99, 101):
        with pytest.raises(ProtocolError):
            decode_data_header(header, wrong)
    with pytest.raises(ProtocolError):
        decode_data_header(header[:-1], 100)
    with pytest.raises(ProtocolError):
        decode_data_header(encode_data_header(TOKEN, LeaseId(1), Epoch(1), 1, []), 0)


def test_lengths_that_wrap_around_are_refused() -> None:
    header = encode_data_header(TOKEN, LeaseId(1), Epoch(1), 1, [0, (1 << 64) - 50, 0, 100])
    with pytest.raises(ProtocolError):
        decode_data_header(header, 50)


def test_metadata_of_another_secret_or_changed_on_the_way_is_incompatible() -> None:
    metadata = UcxMetadata(A, WIRE_VERSION, "1.22.0", "am", "127.0.0.1", "host", PROCESS, (LaneAddress(Lane.TCP, b"worker address"),))
    signed = MetadataCodec(b"secret").encode(metadata)
    assert MetadataCodec(b"secret").decode(signed) == metadata
    with pytest.raises(IncompatibleError):
        MetadataCodec(b"other").decode(signed)
    with pytest.raises(IncompatibleError):
        MetadataCodec(b"secret").decode(signed.replace(b"worker address", b"worker Address"))
    with pytest.raises(ProtocolError):
        metadata.address_on(Lane.SHM)
