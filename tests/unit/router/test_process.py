"""The router as a process of its own: starts, serves, drains on SIGTERM and exits 0."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from pd_serve.protocol.link import Role
from tests.fakes import write_tokenizer
from tests.fakes_worker import MockWorker, Script, mock_worker, running
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.unit.router.cluster import completion_body, events_of

PROGRAM = """
import sys
from pd_serve.config import Config
from router.main import serve_router
sys.exit(serve_router(Config.model_validate_json(sys.argv[1])))
"""


@asynccontextmanager
async def router_process(
    tmp_path: Path, worker: MockWorker, drain_deadline_s: float = 10.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    port = free_port()
    async with running(worker) as address:
        config = {
            "model": {"id": str(write_tokenizer(tmp_path / "model")), "name": "tiny"},
            "router": {"port": port, "workers": [address]},
            "worker": {"drain_deadline_s": drain_deadline_s},
        }
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, json.dumps(config), stderr=asyncio.subprocess.PIPE)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http:
                await ready(http)
                yield process, http
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def ready(http: httpx.AsyncClient) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            if (await http.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def test_sigterm_lets_streams_end_and_exits_0(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(interval_s=0.02))
    async with (
        router_process(tmp_path, worker) as (process, http),
        http.stream("POST", "/v1/completions", json=completion_body(max_tokens=100, stream=True)) as response,
    ):
        lines = response.aiter_text()
        text = await anext(lines)
        process.send_signal(signal.SIGTERM)
        async for piece in lines:
            text += piece
        assert events_of(text)[-1] == "[DONE]"
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    assert worker.open_attempts == set()


async def test_drain_deadline_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH, script=Script(stall_after=2))
    async with (
        router_process(tmp_path, worker, drain_deadline_s=0.3) as (process, http),
        http.stream("POST", "/v1/completions", json=completion_body(stream=True)) as response,
    ):
        lines = response.aiter_text()
        text = await anext(lines)
        process.send_signal(signal.SIGTERM)
        async for piece in lines:
            text += piece
        assert events_of(text)[-1]["error"]["type"] == "server_error"  # type: ignore[index]
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
