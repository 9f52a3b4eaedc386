"""Encoding of everything that crosses a process: msgpack of msgspec structs, tagged, unknown fields refused, size bounded.

Called by the protocol modules and by the processes at their edges. A frame that does not decode is a ProtocolError and nothing else.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from pd_serve.errors import ProtocolError

PROTOCOL_VERSION = 5
"""Bumped by every change to a frame, record or handshake."""

MAX_FRAME_NBYTES = 64 * 1024 * 1024

T = TypeVar("T")


class Codec(Generic[T]):
    """Encoder and decoder of one tagged union. Not thread-safe: one per thread."""

    def __init__(self, union: Any, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._max_nbytes = max_nbytes

    def encode(self, value: T) -> bytes:
        return self._encoder.encode(value)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Raises ProtocolError on anything that is not exactly one valid frame."""
        if len(data) > self._max_nbytes:
            raise ProtocolError(f"frame of {len(data)} bytes exceeds the limit of {self._max_nbytes}")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"malformed frame: {error}") from error
