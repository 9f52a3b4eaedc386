"""Frames about the prefix cache that mean nothing do not decode."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.errors import ProtocolError
from pd_serve.protocol.cache_events import MAX_DIGESTS, CacheEvents
from pd_serve.protocol.link import worker_codec

CODEC = worker_codec()
EVENTS = CacheEvents(3, b"12345678", b"abcdefgh")
PART = CacheEvents(3, b"12345678", part=1, num_parts=2)


@pytest.mark.parametrize("frame", [EVENTS, PART, CacheEvents(0, b"", num_parts=1), CacheEvents(1, b"x" * 8 * MAX_DIGESTS)])
def test_what_a_worker_sends_arrives(frame: CacheEvents) -> None:
    assert CODEC.decode(CODEC.encode(frame)) == frame


@pytest.mark.parametrize(
    "fields",
    [
        {"stored": b"1234567"},
        {"removed": b"123456789"},
        {"stored": b"x" * 8 * (MAX_DIGESTS + 1)},
        {"removed": b"x" * 8 * (MAX_DIGESTS + 1)},
        {"seq": -1},
        {"part": -1},
        {"part": 1},
        {"part": 2, "num_parts": 2, "removed": b""},
        {"num_parts": -1},
        {"num_parts": 1},
        {"num_parts": 2**63, "part": 2**63, "removed": b""},
    ],
    ids=str,
)
def test_nonsense_is_refused(fields: dict[str, object]) -> None:
    tree = msgspec.msgpack.decode(CODEC.encode(EVENTS))
    with pytest.raises(ProtocolError):
        CODEC.decode(msgspec.msgpack.encode(tree | fields))
