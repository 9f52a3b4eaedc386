"""A router of several processes: one port, one set of limits, one view of the workers, and what is left when a process dies."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from pd_serve.bench.mock_worker import MockConnection, MockSettings, Turns
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import Role
from tests.fakes import peer_id, write_tokenizer
from tests.patience import PATIENCE_S, Waiting
from tests.ports import free_port
from tests.unit.router.cluster import completion_body, until
from tests.unit.router.test_process import PROGRAM, ready

NUM_PROCESSES = 2
PEER = peer_id("worker-0")


class Worker:
    """The bench's mock worker: unlike the scripted one it has any number of links at a time."""

    def __init__(self, interval_s: float) -> None:
        self._settings = MockSettings(interval_s=interval_s)
        self._connections: list[MockConnection] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        turns = Turns(self._settings.interval_s)

        def connection() -> MockConnection:
            self._connections.append(MockConnection(PEER, self._settings, turns))
            return self._connections[-1]

        async with await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    @property
    def num_links(self) -> int:
        """So far."""
        return sum(connection.link is not None for connection in self._connections)

    @property
    def num_open(self) -> int:
        return sum(connection.link.num_open for connection in self._connections if connection.link is not None)


@asynccontextmanager
async def processes(tmp_path: Path, worker: Worker, **router: object) -> AsyncIterator[tuple[psutil.Process, str]]:
    """The supervisor and its address; the worker has registered once, at whichever process the connection came to."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with worker.running() as address:
        config = {
            "model": {"id": str(write_tokenizer(tmp_path / "model")), "name": "tiny"},
            "router": {"port": port, "processes": NUM_PROCESSES, **router},
            "worker": {"drain_deadline_s": 5.0},
        }
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, json.dumps(config))
        try:
            await _register(url, address)
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                await ready(http)
            await until(lambda: worker.num_links >= NUM_PROCESSES, "a link from each process", PATIENCE_S)
            yield psutil.Process(process.pid), url
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def _register(url: str, address: str) -> None:
    """As soon as any process listens."""
    body = RegisterWorker(worker_id=PEER.worker_id, incarnation=PEER.incarnation, address=address, role=Role.BOTH, ready=True)
    waiting = Waiting(PATIENCE_S, 0.05)
    while not waiting.is_over():
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
                answer = await http.post(f"{url}/internal/v1/workers", json=body.model_dump(mode="json"))
        except httpx.TransportError:
            await asyncio.sleep(0.05)
        else:
            assert answer.status_code == 200
            return
    raise AssertionError("no process of the router listens")


async def _get(url: str, path: str) -> httpx.Response:
    """Over a connection of its own, which may come to any process."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return await http.get(url + path)


async def _complete(url: str) -> int:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        return (await http.post(f"{url}/v1/completions", json=completion_body())).status_code


async def test_one_registration_reaches_every_process_and_metrics_are_of_all(tmp_path: Path) -> None:
    worker = Worker(interval_s=0.0)
    async with processes(tmp_path, worker) as (supervisor, url):
        assert [await _complete(url) for _ in range(12)] == [200] * 12
        texts = [(await _get(url, "/metrics")).text for _ in range(4)]
        assert all('pd_serve_requests_total{code="200"} 12.0' in text for text in texts)
        assert all('pd_serve_linked_workers{role="both"} 1.0' in text for text in texts)
        assert len((await _get(url, "/internal/v1/requests")).json()["requests"]) == 12

        supervisor.children()[0].kill()
        await until(lambda: worker.num_links > NUM_PROCESSES, "the process that was started again has linked", PATIENCE_S)
        assert await _complete(url) == 200

        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            address = (await http.get("/admin/workers")).json()["workers"][0]["status"]["address"]
            await http.delete(f"/admin/workers/{PEER.worker_id}?force")
            await _until_linked(url, 0)
            assert (await _get(url, "/admin/workers")).json()["removed"] == [PEER.worker_id]
            await http.post("/admin/workers", json={"address": address})
        await _until_linked(url, 1)
        assert await _complete(url) == 200


async def _until_linked(url: str, expected: int) -> None:
    """Every process says so: of this number the most is told."""
    waiting = Waiting(PATIENCE_S, 0.05)
    while f'pd_serve_linked_workers{{role="both"}} {expected}.0' not in (await _get(url, "/metrics")).text:
        assert not waiting.is_over()
        await asyncio.sleep(0.05)


async def test_the_limit_of_open_requests_is_of_all_processes(tmp_path: Path) -> None:
    worker = Worker(interval_s=3600.0)
    async with processes(tmp_path, worker, max_open_requests=3) as (_, url):
        waiting = [asyncio.create_task(_complete(url)) for _ in range(3)]
        await until(lambda: worker.num_open == 3, "three requests in progress", PATIENCE_S)
        assert [await _complete(url) for _ in range(6)] == [429] * 6
        assert {(await _get(url, "/internal/v1/status")).json()["open_requests"] for _ in range(4)} == {3}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: not worker.num_open, "nothing in progress", PATIENCE_S)
