"""A rank's end of a Unix socket, to its front or to another rank: framing and buffering, never blocking. Owned by the control thread.

Each frame is a length (length_prefix.py), then msgpack. A process that reads slowly costs memory here, up to a bound; past it it is taken
for dead, because a rank must not wait for it inside a step.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from pd_serve.length_prefix import LENGTH_NBYTES, announced_nbytes, prefixed

_READ_NBYTES = 1 << 18
_BUFFERS_PER_SEND = 64
_MAX_UNSENT_NBYTES = 256 * 1024 * 1024


In = TypeVar("In")
Out = TypeVar("Out")


class FrameSocket(Generic[In, Out]):
    """Wraps a connected stream socket and owns it from then on."""

    def __init__(self, connected: socket.socket, decode: Callable[[bytes], In], encode: Callable[[Out], bytes], other: str) -> None:
        """`decode` raises ProtocolError; `other`: who is at the far end, for messages."""
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_nbytes = 0
        self._decode = decode
        self._encode = encode
        self._other = other
        self.closed = False
        """The other has closed its end, or cannot be written to any more."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """After a flush: call it again when the socket becomes writable."""
        return bool(self._unsent)

    def receive(self) -> list[In]:
        """Everything that has arrived, in order. Sets `closed` at the end of the stream. Raises ProtocolError on what is no frame."""
        while not self.closed:
            try:
                data = self._socket.recv(_READ_NBYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
            self._received += data
            if len(data) < _READ_NBYTES:
                break
        return self._take_frames()

    def send(self, frame: Out) -> None:
        """Queue a frame; `flush` sends it."""
        framed = prefixed(self._encode(frame))
        self._unsent.append(memoryview(framed))
        self._num_unsent_nbytes += len(framed)
        if self._num_unsent_nbytes > _MAX_UNSENT_NBYTES:
            self.closed = True

    def flush(self) -> None:
        """Send what the socket takes, without waiting."""
        while self._unsent and not self.closed:
            try:
                sent = self._socket.sendmsg(list(islice(self._unsent, _BUFFERS_PER_SEND)))
            except BlockingIOError:
                return
            except ConnectionError:
                self.closed = True
                return
            self._num_unsent_nbytes -= sent
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.popleft())
            if sent:
                self._unsent[0] = self._unsent[0][sent:]

    def flush_for(self, timeout_s: float) -> None:
        """Send everything queued, waiting at most `timeout_s` for each piece: for the last words of a process."""
        try:
            self._socket.settimeout(timeout_s)
            while self._unsent and not self.closed:
                self._socket.sendall(self._unsent.popleft())
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self._socket.close()

    def _take_frames(self) -> list[In]:
        frames: list[In] = []
        buffer, begin = self._received, 0
        while len(buffer) - begin >= LENGTH_NBYTES:
            start = begin + LENGTH_NBYTES
            end = start + announced_nbytes(buffer, begin, self._other)
            if len(buffer) < end:
                break
            frames.append(self._decode(bytes(buffer[start:end])))
            begin = end
        if begin:
            del buffer[:begin]
        return frames
