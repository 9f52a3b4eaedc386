from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd_serve.ids import RouterId
from pd_serve.protocol.control import Registered, RegisterWorker
from pd_serve.protocol.link import Role
from tests.patience import PATIENCE_S
from workers.front_registration import Registrar, RegistrarSettings

WORKER = RegisterWorker(worker_id="w", incarnation=1, address="http://127.0.0.1:1", role=Role.DECODE, ready=True)
HEARTBEAT_S = 0.1


class Router:
    """Answers every registration and counts them."""

    def __init__(self) -> None:
        self.registrations: asyncio.Queue[None] = asyncio.Queue()
        self.url = ""

    async def heard(self, count: int) -> None:
        """Until so many more registrations have come."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(count):
                await self.registrations.get()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = Registered(router_id="router", heartbeat_s=HEARTBEAT_S, linked=True).model_dump_json().encode()
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
                self.registrations.put_nowait(None)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except asyncio.IncompleteReadError:
            writer.close()


@asynccontextmanager
async def registering(linked: set[RouterId]) -> AsyncIterator[tuple[Router, Registrar]]:
    router = Router()
    async with await asyncio.start_server(router.answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        registrar = Registrar(f"http://{host}:{port}", RegistrarSettings("", HEARTBEAT_S), lambda: WORKER, linked.__contains__)
        task = asyncio.create_task(registrar.run())
        yield router, registrar
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_without_a_link_registers_at_every_heartbeat() -> None:
    async with registering(set()) as (router, _):
        await router.heard(4)


async def test_a_linked_worker_registers_rarely_and_at_once_when_its_link_ends() -> None:
    linked = {RouterId("router")}
    async with registering(linked) as (router, registrar):
        await router.heard(1)
        began_at = asyncio.get_running_loop().time()
        await asyncio.sleep(4 * HEARTBEAT_S)
        lasted_s = asyncio.get_running_loop().time() - began_at
        assert router.registrations.qsize() < lasted_s / (2 * HEARTBEAT_S)
        linked.clear()
        registrar.hasten()
        await router.heard(4)
