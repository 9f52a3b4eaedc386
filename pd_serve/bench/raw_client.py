"""A client that costs next to nothing: prepared requests over raw HTTP/1.1, so that what is measured is the server. For bench/router.py.

It understands what routers answer with: a head, then a body of known length or chunks up to the empty one. Anything but 200 is an error.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
EVENT = b"data: {"


@dataclass(slots=True)
class Answer:
    """Of one request; seconds on this process's performance counter."""

    sent_s: float
    done_s: float = 0.0
    event_s: list[float] = field(default_factory=list)
    """Arrival of each event; only where they are timed."""
    error: str = ""


class RawConnection(asyncio.Protocol):
    """One request at a time on one connection: `await ask(request)`."""

    def __init__(self, times_events: bool) -> None:
        self._times_events = times_events
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[Answer] | None = None
        self._buffer = b""
        self._has_head = False
        self._left = -1
        """Bytes of the body still to come; -1: chunks."""
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports do not subclass asyncio's
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(f"connection lost: {exc or 'closed by the server'}")

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """The answer, errors included. Precondition: the last one has come."""
        self._done = self._loop.create_future()
        self._buffer, self._has_head, self._left = b"", False, -1
        self._answer = Answer(time.perf_counter())
        if self._transport is None:
            self._end("not connected")
        else:
            self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._has_head:
            self._buffer += data
            end = self._buffer.find(HEAD_END)
            if end < 0:
                return
            head, data, self._buffer = self._buffer[:end].lower(), self._buffer[end + 4 :], b""
            self._has_head = True
            if not head.startswith(b"http/1.1 200"):
                self._end(head.partition(b"\r\n")[0].decode("latin-1"))
                return
            _, found, rest = head.partition(b"content-length:")
            self._left = int(rest.partition(b"\r\n")[0]) if found else -1
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end("")
            return
        if self._times_events:
            self._answer.event_s.extend([time.perf_counter()] * data.count(EVENT))
        self._buffer = (self._buffer + data)[-len(LAST_CHUNK) :]
        if self._buffer == LAST_CHUNK:
            self._end("")

    def _end(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._answer.done_s, self._answer.error = time.perf_counter(), error
            self._done.set_result(self._answer)


def request_bytes(path: str, body: bytes, host: str = "127.0.0.1") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def connect(port: int, times_events: bool = False, host: str = "127.0.0.1") -> RawConnection:
    """Raises OSError."""
    _, connection = await asyncio.get_running_loop().create_connection(lambda: RawConnection(times_events), host, port)
    return connection


async def ask_for(port: int, request: bytes, concurrency: int, seconds: float) -> list[Answer]:
    """Ask again as soon as an answer has come, on so many connections, for so long. A lost connection is opened again."""
    answers: list[Answer] = []
    until = time.perf_counter() + seconds

    async def one() -> None:
        connection = await connect(port)
        while time.perf_counter() < until:
            answer = await connection.ask(request)
            answers.append(answer)
            if answer.error:
                connection.close()
                connection = await connect(port)
        connection.close()

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers


async def stream_all(port: int, requests: list[bytes]) -> list[Answer]:
    """All at once, each on a connection of its own, events timed. Connections are made before the first request is sent."""
    connections = [await connect(port, times_events=True) for _ in requests]
    try:
        return await asyncio.gather(*(connection.ask(request) for connection, request in zip(connections, requests, strict=True)))
    finally:
        for connection in connections:
            connection.close()
