"""Everything that two transports say to each other, and how it is told apart from what a stranger says.

JOIN channel     digest (32 bytes) + msgpack of Hello | Answer | Refusal. The digest is HMAC-SHA256 keyed by the cluster's secret.
SESSION channel  token (16 bytes) + msgpack of Ping | Pong | Bye | FlushRequest | FlushReply | Record.
DATA channel     token, lease, epoch, and the (offset, length) of each piece of the payload, in a fixed binary form.

The token is derived from the secret and both nonces of one join (`session_token`), so it never travels in a hello, nobody without the
secret can make one, and one of an earlier join is worth nothing. Whatever does not decode is a ProtocolError and nothing else.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import ProtocolError
from pd_serve.ids import Epoch, LeaseId, PeerId
from pd_serve.transport.ucx.process import ProcessIdentity
from pd_serve.wire import Codec

WIRE_VERSION = 2
"""Bumped by every change to this file or to the meaning of what it carries."""
NONCE_NBYTES = 16
DIGEST_NBYTES = 32
TOKEN_NBYTES = 16
MAX_CONTROL_NBYTES = 5632
MAX_PIECES = 64
"""Pieces of one data message; each adds 16 bytes to its header."""
PROBE_LEASE = LeaseId(-1)
"""Data messages of the probe at join: their bytes go to the scratch area, never to the pool."""

_DATA = struct.Struct("<16sqqHH")
_DOMAIN = b"pd-serve/ucx/1/"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of everything on the JOIN and SESSION channels."""


# ---- JOIN: signed with the secret


class Hello(Message, frozen=True, tag="hello"):
    """Sent on add_peer and repeated until the join ends. Fresh for each join: a new nonce."""

    sender: PeerId
    receiver: PeerId
    nonce: bytes
    wire_version: int
    ucx_version: str
    pool_nbytes: int
    lane: str
    process: ProcessIdentity
    reply_address: bytes
    """The sender's worker address for messages on that lane, for an answer by someone who has not been told of the sender."""


class MemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the sender that the receiver may write into."""

    address: int
    nbytes: int
    key: bytes
    """Empty: only as checked messages."""


class Answer(Message, frozen=True, tag="answer"):
    """To a hello whose digest was right, from one who has added its sender. Proves that this side knows the secret now (`echo`)."""

    sender: PeerId
    receiver: PeerId
    nonce: bytes
    echo: bytes
    """The nonce of the hello that this answers."""
    pool: MemoryOffer
    scratch: MemoryOffer


class Refusal(Message, frozen=True, tag="refusal"):
    sender: PeerId
    echo: bytes
    detail: str


JoinMessage = Hello | Answer | Refusal


# ---- SESSION: carry the token of a join


class Ping(Message, frozen=True, tag="ping"):
    seq: int


class Pong(Message, frozen=True, tag="pong"):
    seq: int


class Bye(Message, frozen=True, tag="bye"):
    """The sender has let go of this session: it has issued its last write, and that has been flushed."""

    detail: str


class FlushRequest(Message, frozen=True, tag="flush"):
    """Answer once `num_messages` data messages of this session's stream have been handled."""

    seq: int
    stream: int
    num_messages: int


class FlushReply(Message, frozen=True, tag="flushed"):
    seq: int
    num_violations: int
    """Data messages since the last reply that broke the window of a live lease."""


class Record(Message, frozen=True, tag="record"):
    """A notice: opaque to the transport."""

    payload: bytes


SessionMessage = Ping | Pong | Bye | FlushRequest | FlushReply | Record


class JoinCodec:
    """Signs and checks JOIN messages. Not thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._codec: Codec[JoinMessage] = Codec(JoinMessage, MAX_CONTROL_NBYTES)

    def encode(self, message: JoinMessage) -> bytes:
        payload = self._codec.encode(message)
        return self._digest(payload) + payload

    def decode(self, data: bytes) -> tuple[JoinMessage, bool]:
        """The message, and whether its digest is right. Raises ProtocolError."""
        if len(data) <= DIGEST_NBYTES:
            raise ProtocolError(f"join message of {len(data)} bytes")
        payload = data[DIGEST_NBYTES:]
        message = self._codec.decode(payload)
        if not isinstance(message, Refusal) and len(message.nonce) != NONCE_NBYTES:
            raise ProtocolError(f"nonce of {len(message.nonce)} bytes")
        return message, hmac.compare_digest(self._digest(payload), data[:DIGEST_NBYTES])

    def session_token(self, sender: PeerId, receiver: PeerId, sender_nonce: bytes, receiver_nonce: bytes) -> bytes:
        """What `sender` puts in front of all it sends to `receiver` in the session that those two nonces made."""
        names = msgspec.msgpack.encode((sender, receiver))
        return keyed_digest(self._secret, b"token", sender_nonce + receiver_nonce + names)[:TOKEN_NBYTES]

    def _digest(self, payload: bytes) -> bytes:
        return keyed_digest(self._secret, b"join", payload)


def keyed_digest(secret: bytes, purpose: bytes, payload: bytes) -> bytes:
    """HMAC-SHA256, of which no value serves two purposes."""
    return hmac.digest(secret, _DOMAIN + purpose + b"/" + payload, "sha256")


def session_codec() -> Codec[SessionMessage]:
    return Codec(SessionMessage, MAX_CONTROL_NBYTES)


class DataHeader(msgspec.Struct, frozen=True, gc=False):
    """Header of a data message; the payload is the pieces one after the other."""

    token: bytes
    lease_id: LeaseId
    epoch: Epoch
    stream: int
    """Number of the endpoint in this session, from 1: a renewed endpoint starts the count of messages anew."""
    pieces: NDArray[np.int64]
    """[n, 2]: offset and length in the receiver's pool. What does not fit into 63 bits reads as negative."""


def encode_data_header(token: bytes, lease_id: LeaseId, epoch: Epoch, stream: int, pieces: Sequence[int]) -> bytes:
    num_pieces = len(pieces) // 2
    return _DATA.pack(token, lease_id, epoch, stream, num_pieces) + struct.pack(f"<{2 * num_pieces}Q", *pieces)


def decode_data_header(header: bytes, payload_nbytes: int) -> DataHeader:
    """Raises ProtocolError unless header and payload are of exactly the sizes that the header tells."""
    if len(header) < _DATA.size:
        raise ProtocolError(f"data header of {len(header)} bytes")
    token, lease_id, epoch, stream, num_pieces = _DATA.unpack_from(header)
    if not 1 <= num_pieces <= MAX_PIECES or len(header) != _DATA.size + 16 * num_pieces:
        raise ProtocolError(f"data header of {len(header)} bytes for {num_pieces} pieces")
    pieces = np.frombuffer(header, np.int64, 2 * num_pieces, _DATA.size).reshape(num_pieces, 2)
    lengths = pieces[:, 1].tolist()
    if min(lengths) < 0 or sum(lengths) != payload_nbytes:
        raise ProtocolError(f"payload of {payload_nbytes} bytes for pieces of {lengths}")
    return DataHeader(token, LeaseId(lease_id), Epoch(epoch), stream, pieces)
