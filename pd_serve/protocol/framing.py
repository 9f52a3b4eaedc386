"""WebSocket frames as links have them: whole binary messages, cut out of what comes and wrapped for what goes, in a few operations each.

A general implementation takes five times as long, on the path of every step. What is no such message (close, ping, parts of messages,
anything wrong) is left as it came, for a general implementation to judge. Used by the router's end of a link.
Source: https://www.rfc-editor.org/rfc/rfc6455#section-5
"""

from __future__ import annotations

import os
import struct

try:
    from websockets.speedups import apply_mask
except ImportError:  # a platform for which it was not compiled
    from websockets.utils import apply_mask

_BINARY = 0x82
"""Final frame of a binary message, which is also its first."""
_MASKED = 0x80
_CONTROL = 0x88
"""With three bits more: close, ping and pong, final."""
_MASKS_NBYTES = 4096


class FrameCutter:
    """cut() whatever comes. Owned by one connection; what it holds back is bounded by `max_nbytes` and one read."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_wanted = 2
        """Bytes held and to come before there is anything to do."""
        self._is_given_up = False

    def cut(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Whole frames from the server, in order: the message, True; or the bytes of a frame that is no whole message, False.

        From the first frame on that no link may send, everything is given back as it comes, False.
        """
        if self._is_given_up:
            return [(data, False)]
        if self._num_held:
            self._held.append(data)
            self._num_held += len(data)
            if self._num_held < self._num_wanted:
                return []
            data = b"".join(self._held)
            self._held.clear()
            self._num_held = 0
        found: list[tuple[bytes, bool]] = []
        begin, end = 0, len(data)
        self._num_wanted = 2
        while end - begin >= 2:
            kind, size = data[begin], data[begin + 1]
            start = begin + 2
            if size >= 126:
                start = begin + (4 if size == 126 else 10)
                if size < _MASKED and end < start:
                    self._num_wanted = start - begin
                    break
                size = int.from_bytes(data[begin + 2 : start], "big") if size < _MASKED else -1
            is_message = kind == _BINARY
            if not 0 <= size <= self._max_nbytes or not (is_message or (kind & 0xF8 == _CONTROL and size < 126)):
                self._is_given_up = True
                found.append((data[begin:], False))
                return found
            stop = start + size
            if stop > end:
                self._num_wanted = stop - begin
                break
            found.append((data[start:stop], True) if is_message else (data[begin:stop], False))
            begin = stop
        if begin < end:
            self._held.append(data[begin:])
            self._num_held = end - begin
        return found


class FrameWrapper:
    """wrap() messages of a client. Owned by one connection."""

    def __init__(self) -> None:
        self._masks = b""
        self._at = 0

    def wrap(self, message: bytes) -> bytes:
        """One whole binary message, masked as the standard wants it of clients."""
        if self._at >= len(self._masks):
            self._masks, self._at = os.urandom(_MASKS_NBYTES), 0
        mask = self._masks[self._at : self._at + 4]
        self._at += 4
        return _head(len(message), _MASKED) + mask + apply_mask(message, mask)


def wrap_bare(message: bytes) -> bytes:
    """One whole binary message of a server."""
    return _head(len(message), 0) + message


def _head(size: int, masked: int) -> bytes:
    if size < 126:
        return bytes((_BINARY, masked | size))
    if size < 1 << 16:
        return struct.pack("!BBH", _BINARY, masked | 126, size)
    return struct.pack("!BBQ", _BINARY, masked | 127, size)
