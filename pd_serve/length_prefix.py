"""Frames on a stream of bytes: 4 bytes of length, little-endian, then the frame. Between processes of one worker, and of one router."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

from pd_serve.errors import ProtocolError
from pd_serve.wire import MAX_FRAME_NBYTES

LENGTH_NBYTES = 4
_LENGTH = struct.Struct("<I")


def prefixed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


def announced_nbytes(data: bytes | bytearray, offset: int, sender: str) -> int:
    """Of the frame whose length stands at `offset`. Raises ProtocolError, naming the sender, for more than a frame may have."""
    (nbytes,) = _LENGTH.unpack_from(data, offset)
    if nbytes > MAX_FRAME_NBYTES:
        raise ProtocolError(f"{sender} announced a frame of {nbytes} bytes")
    return int(nbytes)


async def payloads(reader: asyncio.StreamReader, sender: str) -> AsyncIterator[bytes]:
    """Of all frames until the other end closes. Raises ProtocolError."""
    try:
        while True:
            nbytes = announced_nbytes(await reader.readexactly(LENGTH_NBYTES), 0, sender)
            yield await reader.readexactly(nbytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        return
