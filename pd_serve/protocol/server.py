"""How a process of ours listens for HTTP: uvicorn, with the bounds it lacks. Used by the router and by the fronts of workers.

    connection   above `max_connections`: 503 and closed, before anything is read
    head         longer than `max_header_nbytes` (request line, headers, trailers): 431 and closed
    whole read   head and body not there `read_timeout_s` after the first byte may have come: 408 and closed
    write        a client that takes nothing for `stall_timeout_s` while bytes wait for it: cut; what it asked for is cancelled

Every bound holds before the app is called, for any path, with or without a key. Owned by the event loop's thread.
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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CUT_EXTENSION = "pd_serve.cut"
"""ASGI extension: a function without arguments that ends the connection at once, whatever still waits to be sent."""

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

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unparsed_nbytes += len(data)
        super().data_received(data)
        if self._unparsed_nbytes > self._limits.max_header_nbytes and not self._is_refused:
            self._refuse(431)

    def handle_websocket_upgrade(self) -> None:
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
        super().on_response_complete()

    # ---- parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_nbytes = 0
        self.scope["extensions"] = {CUT_EXTENSION: {"cut": self.transport.abort}}
        if self._read_timer is None:
            self._await_request()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unparsed_nbytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed_nbytes = 0
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
        if is_answering and cycle.response_started:
            transport.abort()
            return
        transport.write(_refusal(status))
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(_LINGER_S, transport.abort)


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


def cut_of(scope: MutableMapping[str, Any]) -> Callable[[], None]:
    """Ends the connection at once; nothing where another server runs the app."""
    extension = scope.get("extensions", {}).get(CUT_EXTENSION)
    cut: Callable[[], None] = extension["cut"] if extension else _nothing
    return cut


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
