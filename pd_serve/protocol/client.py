"""The two ways of speaking to another process: the router's end of a link (hot), and control calls over HTTP (rare).

A `Link` is websockets' sans-I/O protocol on an asyncio transport, but for the messages themselves, which framing.py cuts and wraps: a
received frame costs one decode and one call, a sent frame one write, with no task and no queue between. Frames sent within one turn of the
event loop leave together. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar, cast

import httpx
import msgspec
from pydantic import BaseModel, ValidationError
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from pd_serve.addresses import http_address, split_address
from pd_serve.errors import AuthenticationError, NotFoundError, PeerLostError, ProtocolError
from pd_serve.ids import RouterId
from pd_serve.protocol.control import (
    LINK_PATH,
    REGISTER_PATH,
    STATUS_PATH,
    WORKER_DRAIN_PATH,
    WORKER_ROLE_PATH,
    WORKER_STATUS_PATH,
    WORKER_TRACES_PATH,
    DrainRequest,
    Registered,
    RegisterWorker,
    RoleRequest,
    RouterStatus,
    WorkerStatus,
)
from pd_serve.protocol.framing import FrameCutter, FrameWrapper
from pd_serve.protocol.link import Role, RouterFrame, WorkerFrame, router_codec, worker_codec
from pd_serve.tls import tls_trouble
from pd_serve.wire import MAX_FRAME_NBYTES, PROTOCOL_VERSION

M = TypeVar("M", bound=BaseModel)

MAX_UNSENT_NBYTES = 256 * 1024 * 1024
"""A link whose other end has left this much unread is closed: it would only grow."""


CLOSE_TIMEOUT_S = 1.0
"""For the other side to read what was sent before a close."""
_HEAD_END = b"\r\n\r\n"


class LinkSettings(msgspec.Struct, frozen=True):
    """How a router introduces itself."""

    router_id: RouterId
    cluster_secret: str
    connect_timeout_s: float = 5.0
    tls: ssl.SSLContext | None = None
    """For https:// addresses; None: the system's authorities."""


FrameSink = Callable[["Link", WorkerFrame], None]
ClosedSink = Callable[["Link", str], None]


class Link(asyncio.Protocol):
    """A live link to one worker front. `open_link` makes it.

    on_frame is called for each frame, in order, from the event loop. on_closed is called exactly once for a link that was opened, after the
    last frame, with the reason; afterwards send() returns False.
    """

    def __init__(self, url: str, settings: LinkSettings, on_frame: FrameSink, on_closed: ClosedSink) -> None:
        self._codec_in = worker_codec()
        self._codec_out = router_codec()
        self._websocket = ClientProtocol(parse_uri(url), max_size=MAX_FRAME_NBYTES)
        self._cutter = FrameCutter(MAX_FRAME_NBYTES)
        self._wrapper = FrameWrapper()
        self._head_end = b""
        """Last bytes received of the handshake, in which its end may have begun."""
        self._settings = settings
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._reason = ""
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.last_heard_at = self._loop.time()
        """Event loop time of the last frame."""
        self._on_frame: FrameSink | None = on_frame
        self._on_closed: ClosedSink | None = on_closed

    def send(self, frame: RouterFrame) -> bool:
        """Queue one frame; everything queued in this turn of the loop is written together. False: the link is closed."""
        if self._is_closed or self._websocket.state is not State.OPEN:
            return False
        if not self._unsent:
            self._loop.call_soon(self._write)
        self._unsent.append(self._wrapper.wrap(self._codec_out.encode(frame)))
        return True

    def close(self, reason: str) -> None:
        """Idempotent; no frame is delivered any more, on_closed follows."""
        self._on_frame = None
        if self._is_closed or self._transport is None:
            return
        self._reason = self._reason or reason
        if self._websocket.state is State.OPEN:
            self._websocket.send_close(1000, "")
            self._unsent += self._websocket.data_to_send()
        self._write()
        self._transport.close()
        self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close without waiting for the other side to read what was sent. Idempotent; on_closed follows."""
        self._on_frame = None
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = self._websocket.connect()
        request.headers["X-PD-Router"] = self._settings.router_id
        request.headers["X-PD-Protocol"] = str(PROTOCOL_VERSION)
        if self._settings.cluster_secret:
            request.headers["Authorization"] = f"Bearer {self._settings.cluster_secret}"
        self._websocket.send_request(request)
        self._unsent += self._websocket.data_to_send()
        self._write()

    def data_received(self, data: bytes) -> None:
        if self._websocket.state is State.CONNECTING:
            data = self._shake_hands(data)
            if not data:
                return
        for part, is_message in self._cutter.cut(data):
            if not is_message:
                self._websocket.receive_data(part)
                self._after_receive()
            elif self._websocket.state is State.OPEN:
                self._deliver(part)

    def _shake_hands(self, data: bytes) -> bytes:
        """Take what belongs to the handshake; returns what came after it."""
        seen = self._head_end + data
        end = seen.find(_HEAD_END)
        rest = b""
        if end >= 0:
            size = end + len(_HEAD_END) - len(self._head_end)
            data, rest = data[:size], data[size:]
        self._head_end = seen[-len(_HEAD_END) + 1 :]
        self._websocket.receive_data(data)
        self._after_receive()
        if rest and self._websocket.state is State.CONNECTING:  # refused: the reason follows
            self._websocket.receive_data(rest)
            self._after_receive()
            return b""
        return rest

    def eof_received(self) -> None:
        self._websocket.receive_eof()
        self._after_receive()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        reason = self._reason or (str(exc) if exc else "closed by the worker")
        if not self.opened.done():
            self.opened.set_exception(self._handshake_error(reason))
        elif self._on_closed is not None and not self.opened.cancelled() and self.opened.exception() is None:
            self._on_closed(self, reason)
        self._on_frame = self._on_closed = None

    def _after_receive(self) -> None:
        for event in self._websocket.events_received():
            if isinstance(event, Response):
                if self._websocket.handshake_exc is None and not self.opened.done():
                    self.opened.set_result(None)
            elif isinstance(event, WebSocketFrame) and event.opcode in (Opcode.BINARY, Opcode.TEXT, Opcode.CONT):
                self.close("the worker sent a frame that is not one binary message")
        pending = self._websocket.data_to_send()
        if pending:
            self._unsent += pending
            self._write()
        if self._websocket.handshake_exc is not None or self._websocket.close_expected():
            self._close_transport()

    def _deliver(self, message: bytes) -> None:
        if self._is_closed or self._on_frame is None:
            return
        self.last_heard_at = self._loop.time()
        try:
            frame = self._codec_in.decode(message)
        except ProtocolError as error:
            self.close(f"protocol error: {error}")
            return
        self._on_frame(self, frame)

    def _write(self) -> None:
        unsent, self._unsent = self._unsent, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        data = b"".join(unsent)
        if data:
            transport.write(data)
            if transport.get_write_buffer_size() > MAX_UNSENT_NBYTES:
                self._reason = self._reason or "the worker does not read its link"
                transport.abort()

    def _close_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _handshake_error(self, reason: str) -> Exception:
        cause = self._websocket.handshake_exc
        if cause is not None:
            response = getattr(cause, "response", None)
            if response is not None and response.status_code in (401, 403):
                return AuthenticationError("the worker refused the cluster secret")
            if response is not None and response.body:
                return ProtocolError(f"link refused ({response.status_code}): {response.body[:300].decode('utf-8', 'replace')}")
            return ProtocolError(f"link handshake failed: {cause}")
        return PeerLostError(f"link closed during the handshake: {reason}")


async def open_link(address: str, settings: LinkSettings, on_frame: FrameSink, on_closed: ClosedSink) -> Link:
    """Connect to `http://host:port` or `https://host:port`. Frames may be delivered before this returns.

    Raises PeerLostError (unreachable, no answer in time), AuthenticationError (wrong secret), ProtocolError (not a link).
    """
    loop = asyncio.get_running_loop()
    is_tls, host, port = split_address(address)
    tls = (settings.tls or ssl.create_default_context()) if is_tls else None
    url = http_address(host, port, is_tls).replace("http", "ws", 1) + LINK_PATH
    link: Link | None = None
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            _, link = await loop.create_connection(lambda: Link(url, settings, on_frame, on_closed), host, port, ssl=tls)
            await link.opened
    except TimeoutError as error:
        raise PeerLostError(f"no answer from {address} in {settings.connect_timeout_s:g} s") from error
    except (OSError, InvalidHandshake, InvalidURI) as error:
        raise PeerLostError(f"cannot connect to {address}: {tls_trouble(error) or error}") from error
    finally:
        if link is not None and (not link.opened.done() or link.opened.cancelled() or link.opened.exception() is not None):
            link.close("handshake failed")
    return link


class ControlClient:
    """Control calls to one router or worker. Close it, or use it as an async context manager.

    Every call raises PeerLostError when there is no answer, AuthenticationError on 401/403, NotFoundError on 404, ProtocolError otherwise.
    """

    def __init__(self, base_url: str, cluster_secret: str = "", timeout_s: float = 5.0, tls: ssl.SSLContext | None = None) -> None:
        headers = {"Authorization": f"Bearer {cluster_secret}"} if cluster_secret else {}
        self._base_url = base_url.rstrip("/")
        verify = True if tls is None else tls
        self._http = httpx.AsyncClient(base_url=self._base_url, headers=headers, timeout=timeout_s, trust_env=False, verify=verify)

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def register(self, worker: RegisterWorker) -> Registered:
        return _parsed(Registered, await self._call("POST", REGISTER_PATH, worker))

    async def router_status(self) -> RouterStatus:
        return _parsed(RouterStatus, await self._call("GET", STATUS_PATH))

    async def worker_status(self) -> WorkerStatus:
        return _parsed(WorkerStatus, await self._call("GET", WORKER_STATUS_PATH))

    async def drain(self, deadline_s: float) -> None:
        await self._call("POST", WORKER_DRAIN_PATH, DrainRequest(deadline_s=deadline_s))

    async def set_role(self, role: Role, deadline_s: float = 30.0) -> None:
        """`deadline_s`: for what runs there in the old role; then it is moved."""
        await self._call("POST", WORKER_ROLE_PATH, RoleRequest(role=role, deadline_s=deadline_s))

    async def traces(self, limit: int) -> bytes:
        """Of a worker; to be parsed by protocol/worker_traces.py."""
        return await self._call("GET", f"{WORKER_TRACES_PATH}?limit={limit}")

    async def _call(self, method: str, path: str, body: BaseModel | None = None) -> bytes:
        content = None if body is None else body.model_dump_json().encode()
        try:
            response = await self._http.request(method, path, content=content, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise PeerLostError(f"{self._base_url}{path}: {tls_trouble(error) or error or type(error).__name__}") from error
        if response.status_code in (401, 403):
            raise AuthenticationError(f"{self._base_url} refused the cluster secret")
        if response.status_code == 404:
            raise NotFoundError(f"{self._base_url} has no {path}")
        if response.status_code >= 400:
            raise ProtocolError(f"{self._base_url}{path} answered {response.status_code}: {response.text[:200]}")
        return response.content


def _parsed(model: type[M], data: bytes) -> M:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"unexpected answer: {error}") from error
