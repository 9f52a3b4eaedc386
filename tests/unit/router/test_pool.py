"""Joining, leaving and coming back, over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pd_serve.config import SecurityConfig
from pd_serve.errors import AuthenticationError, PeerLostError, ProtocolError
from pd_serve.ids import RouterId
from pd_serve.observe import Metrics
from pd_serve.protocol.client import ControlClient, LinkSettings, open_link
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import Peers, Role
from pd_serve.wire import PROTOCOL_VERSION
from router.pool import PoolSettings, WorkerPool
from tests.fakes import kv_layout, peer_info, serving, welcome
from tests.fakes_worker import MockWorker, mock_worker, running
from tests.ports import free_port
from tests.unit.router.cluster import cluster, until


def new_pool(worker_timeout_s: float = 5.0) -> WorkerPool:
    settings = PoolSettings(LinkSettings(RouterId("r"), "hush"), worker_timeout_s, join_grace_s=5.0, text_vocab_size=260)
    return WorkerPool(settings, Metrics(CollectorRegistry()))


@asynccontextmanager
async def following(pool: WorkerPool, *addresses: str):  # type: ignore[no-untyped-def]
    pool.start(addresses)
    try:
        yield pool
    finally:
        await pool.close()


def registration(worker: MockWorker, address: str) -> RegisterWorker:
    peer = worker.info.info.peer
    return RegisterWorker(worker_id=peer.worker_id, incarnation=peer.incarnation, address=address, role=worker.role, ready=True)


async def test_link_introduces_the_router() -> None:
    worker = mock_worker()
    async with running(worker) as address, following(new_pool(), address) as pool:
        await until(lambda: pool.workers, "linked")
    assert worker.headers["x-pd-router"] == "r"
    assert worker.headers["x-pd-protocol"] == str(PROTOCOL_VERSION)
    assert worker.headers["authorization"] == "Bearer hush"


async def test_every_worker_hears_of_every_other() -> None:
    first, second = mock_worker("a"), mock_worker("b")
    async with running(first) as one, running(second) as two, following(new_pool(), one, two):
        await until(lambda: first.of(Peers) and len(first.of(Peers)[-1].peers) == 2, "first heard")  # type: ignore[union-attr]
        await until(lambda: second.of(Peers) and len(second.of(Peers)[-1].peers) == 2, "second heard")  # type: ignore[union-attr]
        second.cut()
        await until(lambda: len(first.of(Peers)[-1].peers) == 1, "first heard of the loss")  # type: ignore[union-attr]
        await until(lambda: len(first.of(Peers)[-1].peers) == 2, "and of the return")  # type: ignore[union-attr]


async def test_restart_on_the_same_port_is_another_peer() -> None:
    lost: list[object] = []
    pool = new_pool()
    pool.on_lost = lost.append
    old, new = mock_worker("a", incarnation=1), mock_worker("a", incarnation=2)
    port = free_port()
    async with following(pool, f"http://127.0.0.1:{port}"):
        async with running(old, port):
            await until(lambda: pool.workers, "linked")
        await until(lambda: not pool.workers, "lost")
        async with running(new, port):
            await until(lambda: pool.workers, "back")
            assert pool.workers[0].peer == new.info.info.peer
    assert lost[0] == old.info.info.peer


async def test_registration_moves_a_worker_to_its_new_address() -> None:
    pool = new_pool()
    old, new = mock_worker("a", incarnation=1), mock_worker("a", incarnation=2)
    async with following(pool), running(old) as first, running(new) as second:
        assert pool.register(registration(old, first)) is False
        await until(lambda: pool.workers, "linked")
        assert pool.register(registration(old, first)) is True
        pool.register(registration(new, second))
        await until(lambda: [worker.peer.incarnation for worker in pool.workers] == [2], "replaced")
        assert pool.register(registration(new, second)) is True
        await asyncio.sleep(0.2)
        assert [worker.peer.incarnation for worker in pool.workers] == [2]


async def test_same_worker_at_two_addresses_is_linked_once() -> None:
    worker = mock_worker("a")
    async with running(worker) as address, following(new_pool(), address, address.replace("127.0.0.1", "localhost")) as pool:
        await until(lambda: pool.workers and pool.refusals(), "second refused")
        assert "already linked" in pool.refusals()[0]
        assert len(pool.workers) == 1


async def test_incompatible_worker_is_refused_with_both_values(tmp_path: Path) -> None:
    good = mock_worker("a")
    odd = MockWorker(welcome(peer_info(mock_worker("b").info.info.peer, role=Role.PREFILL, layout=kv_layout(num_layers=3))))
    async with cluster(tmp_path, good) as c, running(odd) as address:
        async with ControlClient(c.url) as control:
            assert not (await control.register(registration(odd, address))).linked
            await until(c.services.pool.refusals, "refused")
            assert "3 layers" in c.services.pool.refusals()[0]
            assert "2 layers" in c.services.pool.refusals()[0]
            status = await control.router_status()
        assert [worker.id for worker in status.workers] == ["a"]
        assert status.workers[0].blocks.total == 256
        refused = [pair for pair in status.pairs if not pair.compatible]
        assert [(pair.joined, "3 layers" in pair.reason) for pair in refused] == [(False, True)]
        await c.services.pool.close()


async def test_silent_worker_is_suspected_without_traffic() -> None:
    worker = mock_worker()
    async with running(worker) as address, following(new_pool(worker_timeout_s=0.3), address) as pool:
        await until(lambda: pool.workers, "linked")
        worker.is_silent = True
        await until(lambda: not pool.workers, "suspected")
        worker.is_silent = False
        await until(lambda: pool.workers, "back")


async def test_garbage_from_a_worker_ends_its_link_only() -> None:
    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": b"\xc1\xff\x00garbage"})
        await receive()

    async with serving(app, lifespan="off") as bad, running(mock_worker()) as good, following(new_pool(), bad, good) as pool:
        await until(lambda: pool.workers, "linked")
        await asyncio.sleep(0.2)
        assert len(pool.workers) == 1


async def test_unreachable_and_refusing_addresses_are_named() -> None:
    settings = LinkSettings(RouterId("r"), "", connect_timeout_s=0.3)
    with pytest.raises(PeerLostError, match=r"127\.0\.0\.1:1"):
        await open_link("http://127.0.0.1:1", settings, lambda link, frame: None, lambda link, reason: None)
    with pytest.raises(ProtocolError):
        await open_link("unix:/x", settings, lambda link, frame: None, lambda link, reason: None)

    async def denies(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"{}"})

    async def hangs(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await asyncio.sleep(1)

    async with serving(denies, lifespan="off") as address:
        with pytest.raises(AuthenticationError):
            await open_link(address, settings, lambda link, frame: None, lambda link, reason: None)
    async with serving(hangs, lifespan="off") as address:
        with pytest.raises(PeerLostError, match="no answer"):
            await open_link(address, settings, lambda link, frame: None, lambda link, reason: None)


async def test_control_client_translates_answers(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=SecurityConfig(cluster_secret="hush")) as c:
        async with ControlClient(c.url, "wrong") as control:
            with pytest.raises(AuthenticationError):
                await control.router_status()
        async with ControlClient(c.url, "hush") as control:
            assert (await control.router_status()).model == "tiny"
    async with ControlClient("http://127.0.0.1:1") as control:
        with pytest.raises(PeerLostError):
            await control.router_status()
