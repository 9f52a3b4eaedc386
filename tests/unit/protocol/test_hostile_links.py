"""Both ends of a link under bytes and frames of a hostile other end: a close and a reason, never a crash, and the next link works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from pd_serve.clock import MonotonicClock
from pd_serve.errors import PdServeError, ProtocolError
from pd_serve.ids import LinkId, RouterId
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.cache_events import CacheEvents, CacheSnapshot
from pd_serve.protocol.client import Link as RouterLink
from pd_serve.protocol.client import LinkSettings, open_link
from pd_serve.protocol.control import LINK_PATH
from pd_serve.protocol.link import (
    Cancel,
    Closed,
    Failed,
    FailureReason,
    Open,
    Peers,
    PeerStatus,
    Ping,
    RefusalReason,
    Refused,
    Reserved,
    Role,
    RouterFrame,
    Step,
    TokenOutput,
    WorkerFrame,
    router_codec,
    worker_codec,
)
from pd_serve.protocol.traces import Traces
from pd_serve.wire import PROTOCOL_VERSION
from router.pool import PoolSettings, WorkerPool
from tests.fakes import joined, load, peer_id, peer_info, sampling, serving, welcome
from tests.hostile import mutated
from tests.patience import PATIENCE_S
from workers.front_app import build_app
from workers.front_links import Link, Links
from workers.front_view import FrontView, Identity

SECRET = "hush"
_router, _worker = router_codec(), worker_codec()
ROUTER_FRAMES = [
    _router.encode(frame)
    for frame in (Peers((peer_info(),)), Open(1, (1, 2, 3), 0, sampling(), peer_id("prefill-0"), 5.0), Cancel(1), Ping(3), CacheSnapshot())
]
WORKER_FRAMES = [
    _worker.encode(frame)
    for frame in (
        welcome(),
        load(),
        PeerStatus((joined(peer_id("prefill-0")),)),
        Reserved(1, None, 0),
        Refused(1, RefusalReason.NO_CAPACITY, "full"),
        Step((TokenOutput(1, 5), TokenOutput(2, 6))),
        Failed(1, FailureReason.ENGINE, "broken"),
        Closed(1),
        CacheEvents(0, b"12345678", part=0, num_parts=2),
        CacheEvents(1, b"12345678", b"abcdefgh"),
    )
]
FEW = settings(max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class FakeFront:
    """A front whose rank only listens."""

    def __init__(self) -> None:
        self.view = FrontView(Identity(peer_id().worker_id, peer_id().incarnation, Role.DECODE, "http://x:1", 1), 3600.0, MonotonicClock())
        self.links = Links()
        self.forwarded: list[RouterFrame] = []
        self.reasons: list[str] = []

    async def open_link(self, router_id: RouterId) -> Link:
        link = self.links.open(router_id)
        self.links.deliver(link.link_id, welcome())
        return link

    async def forward(self, link_id: LinkId, frame: RouterFrame) -> None:
        self.forwarded.append(frame)

    def close_link(self, link: Link, reason: str) -> None:
        self.links.remove(link, reason)
        self.reasons.append(reason)

    def drain(self, deadline_s: float) -> None: ...

    def set_role(self, role: Role, deadline_s: float) -> None: ...

    async def traces(self, limit: int) -> Traces:
        return Traces(())

    def render_metrics(self) -> bytes:
        return b""


def headers(router: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRET}", "X-PD-Router": router, "X-PD-Protocol": str(PROTOCOL_VERSION)}


@FEW
@given(st.lists(st.one_of(mutated(ROUTER_FRAMES), st.text(max_size=50)), min_size=1, max_size=6))
def test_a_front_closes_a_link_at_its_first_bad_frame(payloads: list[bytes | str]) -> None:
    asyncio.run(_to_front(payloads))


async def _to_front(payloads: list[bytes | str]) -> None:
    front = FakeFront()
    good: list[RouterFrame] = []
    is_bad = False
    for payload in payloads:
        try:
            good.append(_router.decode(payload if isinstance(payload, bytes) else b""))
        except ProtocolError:
            is_bad = True
            break
    async with serving(build_app(front, SECRET), lifespan="off") as url:
        address = url.replace("http", "ws") + LINK_PATH
        async with connect(address, additional_headers=headers("r"), proxy=None) as socket:
            await socket.recv()
            try:
                for payload in payloads:
                    await socket.send(payload)
                if is_bad:
                    await asyncio.wait_for(socket.recv(), PATIENCE_S)
                    raise AssertionError("something came instead of a close")
            except ConnectionClosed:
                assert is_bad
        async with connect(address, additional_headers=headers("other"), proxy=None) as socket:
            assert await socket.recv() == _worker.encode(welcome())
    assert list(map(repr, front.forwarded)) == list(map(repr, good))  # not-a-number differs from itself
    assert not len(front.links)


@FEW
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4), st.booleans())
def test_a_front_survives_what_is_no_websocket(payloads: list[bytes], is_upgraded: bool) -> None:
    asyncio.run(_raw_to_front(payloads, is_upgraded))


async def _raw_to_front(payloads: list[bytes], is_upgraded: bool) -> None:
    front = FakeFront()
    lines = [f"GET {LINK_PATH} HTTP/1.1", "host: x", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"]
    lines += ["sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==", *(f"{name}: {value}" for name, value in headers("r").items()), "", ""]
    async with serving(build_app(front, SECRET), lifespan="off") as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        if is_upgraded:
            writer.write("\r\n".join(lines).encode())
            await reader.readuntil(b"\r\n\r\n")
        for payload in payloads:
            writer.write(payload)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        async with connect(url.replace("http", "ws") + LINK_PATH, additional_headers=headers("other"), proxy=None) as socket:
            await socket.recv()
    assert not len(front.links)


@asynccontextmanager
async def hostile_worker(payloads: list[bytes | str]) -> AsyncIterator[str]:
    async def talk(connection: ServerConnection) -> None:
        try:
            for payload in payloads:
                await connection.send(payload)
            await connection.wait_closed()
        except ConnectionClosed:
            pass

    async with serve(talk, "127.0.0.1", 0, close_timeout=0.1) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@FEW
@given(st.lists(st.one_of(mutated(WORKER_FRAMES), st.text(max_size=50)), min_size=1, max_size=6), st.booleans())
def test_a_router_closes_a_link_at_its_first_bad_frame(payloads: list[bytes | str], is_welcomed: bool) -> None:
    asyncio.run(_to_router([_worker.encode(welcome()), *payloads] if is_welcomed else payloads))


async def _to_router(payloads: list[bytes | str]) -> None:
    is_bad = False
    for payload in payloads:
        try:
            _worker.decode(payload if isinstance(payload, bytes) else b"")
        except ProtocolError:
            is_bad = True
            break
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    seen: list[WorkerFrame] = []

    def on_frame(link: RouterLink, frame: WorkerFrame) -> None:
        seen.append(frame)
        if len(seen) == len(payloads):
            link.close("all there")

    async with hostile_worker(payloads) as address:
        link = await open_link(address, LinkSettings(RouterId("r"), SECRET), on_frame, lambda link, reason: closed.set_result(reason))
        reason = await asyncio.wait_for(closed, PATIENCE_S)
        assert not link.send(Ping(1))
        assert ("protocol error" in reason or "not one binary message" in reason) == is_bad, reason
        await _to_pool(address)


async def _to_pool(address: str) -> None:
    """The same to a router's pool of workers: it refuses, or goes on; its tasks live."""
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(str(context)))
    settings_ = PoolSettings(LinkSettings(RouterId("r"), SECRET), 5.0, 1.0, 260)
    pool = WorkerPool(settings_, Metrics(CollectorRegistry(), Side.ROUTER))
    changes = asyncio.Event()
    pool.on_change = changes.set
    pool.start((address,))
    await asyncio.sleep(0.03)
    pool.statuses()
    await pool.close()
    assert not failures
    assert not pool.workers


@FEW
@given(st.binary(max_size=300), st.booleans())
def test_a_router_survives_what_is_no_websocket(junk: bytes, is_upgraded: bool) -> None:
    asyncio.run(_raw_to_router(junk, is_upgraded))


async def _raw_to_router(junk: bytes, is_upgraded: bool) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write((b"HTTP/1.1 101 Switching Protocols\r\n" if is_upgraded else b"") + junk)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            link = await open_link(address, LinkSettings(RouterId("r"), SECRET), lambda link, frame: None, lambda link, reason: None)
        except PdServeError:
            return
        link.abort("test")
