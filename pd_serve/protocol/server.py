"""How a process of ours listens for HTTP: uvicorn, with the bounds it lacks. Used by the router and by the fronts of workers.

    connection   above `max_connections`: 503 and closed, before anything is read
    head         longer than `max_header_nbytes` (request line, headers, trailers): 431 and closed
    whole read   head and body not there `read_timeout_s` after the first byte may have come: 408 and closed
    write        a client that takes nothing for `stall_timeout_s` while bytes wait for it: cut; what it asked for is cancelled

Every bound holds before the app is called, for any path, with or without a key. An app may have `answer_at_once`: it is called for a POST
that came whole in one read, with no task; what it does not answer then comes by ASGI. Owned by the event loop's thread.
Source: https://www.rfc-editor.org/rfc/rfc9110 (status codes), https://asgi.readthedocs.io (extensions).
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

LINE_EXTENSION = "pd_serve.line"
"""ASGI extension: the AnswerLine of the request."""

_LINGER_S = 1.0
"""For a client to read why it was refused, while what it still sends is thrown away."""
_REASONS: dict[int, tuple[str, str, str]] = {
    400: ("Bad Request", "bad_request", "the request is not HTTP"),
    408: ("Request Timeout", "request_timeout", "the request did not arrive in time"),
    431: ("Request Header Fields Too Large", "headers_too_large", "the request line and headers exceed the limit"),
    503: ("Service Unavailable", "too_many_connections", "too many connections are open"),
}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_connections: int
    """WebSockets do not count: they have been let in by their secret."""
    max_header_nbytes: int
    read_timeout_s: float
    stall_timeout_s: float


AtOnce = Callable[[Any, bytes], bool]
"""`answer_at_once(scope, body)` of an app. True: it answers by the request's AnswerLine, now or later. Raises nothing."""


class AnswerLine:
    """The way of one answer to its client, with no task between: what an app may use instead of ASGI's `receive` and `send`.

    begin -> write ... -> the last write;  or answer.  Headers: lower case, without content-length and transfer-encoding.
    """

    __slots__ = ("_cycle", "_head", "_on_clear", "_on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._head = b""
        """Goes out with what is written first."""
        self._on_gone: Callable[[], None] = _nothing
        self._on_clear: Callable[[], None] = _nothing

    @property
    def has_begun(self) -> bool:
        """Nothing but this answer can be sent any more."""
        return bool(self._cycle.response_started)

    @property
    def is_over(self) -> bool:
        """The whole answer has been sent, or its client is gone."""
        return self._cycle.response_complete or self._cycle.disconnected

    @property
    def is_clear(self) -> bool:
        """The client keeps up, as far as can be seen: what is written now does not wait behind much."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.response_complete or cycle.disconnected)

    def begin(self, headers: bytes) -> None:
        """An answer in parts, status 200, whose length nobody knows yet. `headers`: whole lines."""
        self._begin(200, headers, b"transfer-encoding: chunked\r\n\r\n")

    def write(self, part: bytes, is_last: bool = False) -> None:
        """Send a part, in one write with the head if it is the first. Nothing happens when the client is gone."""
        cycle = self._cycle
        if cycle.response_complete or cycle.disconnected:
            return
        chunk = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
        if self._head or is_last:
            chunk = b"%b%b%b" % (self._head, chunk, b"0\r\n\r\n" if is_last else b"")
            self._head = b""
        if chunk:
            cycle.transport.write(chunk)
        if is_last:
            self._complete()

    def answer(self, headers: bytes, body: bytes, status: int = 200) -> None:
        """A whole answer as one write. Nothing happens when the client is gone."""
        if not self.is_over:
            self._begin(status, headers, b"content-length: %d\r\n\r\n" % len(body))
            self._cycle.transport.write(self._head + body)
            self._complete()

    def _begin(self, status: int, headers: bytes, rest: bytes) -> None:
        cycle = self._cycle
        assert not cycle.response_started
        cycle.response_started = True
        lines = b"".join([b"%b: %b\r\n" % header for header in cycle.default_headers])
        closing = b"" if cycle.keep_alive else b"connection: close\r\n"
        self._head = b"%b%b%b%b%b" % (STATUS_LINE[status], lines, headers, closing, rest)

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        self._on_gone = self._on_clear = _nothing
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        on_response, cycle.on_response = cycle.on_response, _nothing
        on_response()

    def watch(self, on_gone: Callable[[], None], on_clear: Callable[[], None]) -> None:
        """`on_gone` is called once, when the client goes before its answer is complete: now, if it has gone. `on_clear` whenever a client
        that did not keep up has read enough. None given before is called any more.
        """
        self._on_gone, self._on_clear = on_gone, on_clear
        if self._cycle.disconnected:
            self.lost()

    def unwatch(self) -> None:
        self._on_gone = self._on_clear = _nothing

    def lost(self) -> None:
        """The client is gone. Idempotent."""
        on_gone = self._on_gone
        self._on_gone = self._on_clear = _nothing
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
            on_gone()

    def cleared(self) -> None:
        """What waited to be sent has been."""
        self._on_clear()

    def cut(self) -> None:
        """End the connection at once, whatever still waits to be sent."""
        self._cycle.transport.abort()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, limits: ServerLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_nbytes = 0
        """Of this request so far, as far as parsed."""
        self._unparsed_nbytes = 0
        """Received since the parser last gave body or ended a message: a name or value that it is still collecting is in there."""
        self._refusal = 0
        self._is_refused = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._lines: list[AnswerLine] = []
        """Of the requests that are not answered yet: one, unless the client sends more before it has read."""
        self._at_once: AtOnce | None = getattr(self.app, "answer_at_once", None)
        self._is_feeding = False
        self._unstarted: RequestResponseCycle | None = None
        """A request whose head has come in this read: perhaps all of it does."""
        self._is_reading = True
        """A request may be on its way in, and is not there."""

    # ---- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503)
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._read_timer)
        _cancel(self._stall_timer)
        self._read_timer = self._stall_timer = None
        super().connection_lost(exc)
        self._lose_lines()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unparsed_nbytes += len(data)
        self._is_feeding = self._at_once is not None
        super().data_received(data)
        self._is_feeding = False
        if self._unstarted is not None:
            self._start(self._unstarted)
        if self._is_reading and self._read_timer is None and not self._is_refused:
            self._await_request()
        if self._unparsed_nbytes > self._limits.max_header_nbytes and not self._is_refused:
            self._refuse(431)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._is_feeding and self._unstarted is None and not cycle.waiting_for_100_continue and cycle.scope["method"] == "POST":
            self._unstarted = cycle
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self, cycle: RequestResponseCycle) -> None:
        """At once, if all of it is there and the app can."""
        self._unstarted = None
        if cycle.more_body or cycle.disconnected or self._at_once is None or not self._at_once(cycle.scope, bytes(cycle.body)):
            super()._start_asgi_task(cycle, self.app)

    def handle_websocket_upgrade(self) -> None:
        self._is_reading = False
        _cancel(self._read_timer)
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or 400)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for so long; if the last answer has not been read either, it never will be."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)
        self._lines = [line for line in self._lines if not line.is_over]
        super().on_response_complete()

    # ---- parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_nbytes = 0
        self._is_reading = True

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            line = AnswerLine(self.cycle)
            self.scope["extensions"] = {LINE_EXTENSION: {"line": line}}
            self._lines.append(line)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unparsed_nbytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_nbytes = 0
        self._is_reading = False
        _cancel(self._read_timer)
        self._read_timer = None
        super().on_message_complete()

    def _count_head(self, nbytes: int) -> None:
        self._head_nbytes += nbytes
        if self._head_nbytes > self._limits.max_header_nbytes:
            self._refusal = 431
            raise ValueError("head too long")  # the parser stops, and send_400_response follows

    # ---- slow clients

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()
        for line in tuple(self._lines):
            line.cleared()

    def _await_request(self) -> None:
        self._read_timer = self.loop.call_later(self._limits.read_timeout_s, self._give_up_reading)

    def _give_up_reading(self) -> None:
        if self.flow.read_paused:  # it is we who do not read: an answer to an earlier request is under way
            self._await_request()
        else:
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        """Say why where no response has begun, read no more, and close. An app that waits for the body hears that the client is gone."""
        self._is_refused = True
        _cancel(self._read_timer)
        transport, cycle = self.transport, self.cycle
        if transport.is_closing():
            return
        self.flow.resume_reading()
        is_answering = cycle is not None and not cycle.response_complete
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self._lose_lines()
        if is_answering and cycle.response_started:
            transport.abort()
            return
        transport.write(_refusal(status))
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(_LINGER_S, transport.abort)

    def _lose_lines(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            line.lost()


def server_config(app: Any, limits: ServerLimits, tls: ssl.SSLContext | None = None, **settings: Any) -> uvicorn.Config:
    """uvicorn's settings with our bounds; `settings` are uvicorn's own, such as `ws`."""
    protocol: Callable[..., asyncio.Protocol] = partial(BoundedHttpProtocol, limits)
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # anything that makes a protocol will do
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=None if tls is None else lambda _, __: tls,
        **settings,
    )


def line_of(scope: MutableMapping[str, Any]) -> AnswerLine:
    """Precondition: the app runs under `server_config`."""
    line: AnswerLine = scope["extensions"][LINE_EXTENSION]["line"]
    return line


def _nothing() -> None:
    return None


def _refusal(status: int) -> bytes:
    phrase, code, message = _REASONS[status]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    return head.encode() + retry + b"\r\n" + body


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
