"""The rank's end of the Unix socket to its front: framing and buffering, never blocking. Owned by the control thread.

Each frame is a 4-byte little-endian length, then msgpack. A front that reads slowly costs memory here, up to a bound; past it the front is
taken for dead, because a rank must not wait for it inside a step.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from itertools import islice

from pd_serve.errors import ProtocolError
from pd_serve.protocol.link import FrontFrame, RankFrame, front_codec, rank_codec
from pd_serve.wire import MAX_FRAME_NBYTES

_LENGTH = struct.Struct("<I")
_READ_NBYTES = 1 << 18
_BUFFERS_PER_SEND = 64
_MAX_UNSENT_NBYTES = 256 * 1024 * 1024


class FrontSocket:
    """Wraps a connected stream socket and owns it from then on."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_nbytes = 0
        self._decode = front_codec().decode
        self._encode = rank_codec().encode
        self.closed = False
        """The front has closed its end, or cannot be written to any more."""

    @staticmethod
    def connect(path: str) -> FrontSocket:
        """Raises OSError when nobody listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return FrontSocket(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """After a flush: call it again when the socket becomes writable."""
        return bool(self._unsent)

    def receive(self) -> list[FrontFrame]:
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

    def send(self, frame: RankFrame) -> None:
        """Queue a frame; `flush` sends it."""
        payload = self._encode(frame)
        self._unsent.append(memoryview(_LENGTH.pack(len(payload)) + payload))
        self._num_unsent_nbytes += _LENGTH.size + len(payload)
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

    def _take_frames(self) -> list[FrontFrame]:
        frames: list[FrontFrame] = []
        buffer, begin = self._received, 0
        while len(buffer) - begin >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(buffer, begin)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(f"the front announced a frame of {nbytes} bytes")
            end = begin + _LENGTH.size + nbytes
            if len(buffer) < end:
                break
            frames.append(self._decode(bytes(buffer[begin + _LENGTH.size : end])))
            begin = end
        if begin:
            del buffer[:begin]
        return frames
