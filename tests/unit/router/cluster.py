"""A router over real sockets in front of mock workers, within the test's event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from pd_serve.config import Config, ModelConfig, OverloadConfig, RouterConfig, SecurityConfig
from router.main import create_app
from router.services import Services
from router.tokenizer import FolderTokenizer
from tests.fakes import CHAT_TEMPLATE, serving, write_tokenizer
from tests.fakes_worker import MockWorker, running
from tests.patience import PATIENCE_S, Waiting

MODEL = "tiny"


@dataclass
class Cluster:
    url: str
    http: httpx.AsyncClient
    services: Services
    addresses: dict[str, str]

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=chat_body(**fields))

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json=completion_body(**fields))

    async def post_raw(self, path: str, body: dict[str, object]) -> tuple[int, str]:
        """Status and body over a connection of its own: httpx's pool takes time with the square of the requests in progress."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            data = json.dumps(body).encode()
            writer.write(f"POST {path} HTTP/1.0\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            head, _, payload = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        text = _unchunked(payload) if b"chunked" in head else payload
        return int(head.split(b" ", 2)[1]), text.decode()

    async def metric(self, name: str, labels: str = "") -> float:
        text = (await self.http.get("/metrics")).text
        for line in text.splitlines():
            if line.startswith(name + labels + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0, **fields}


def completion_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": "hi", "max_tokens": 8, "temperature": 0, **fields}


@asynccontextmanager
async def cluster(
    tmp_path: Path,
    *workers: MockWorker,
    wait_ready: bool = True,
    security: SecurityConfig | None = None,
    overload: OverloadConfig | None = None,
    template: str = CHAT_TEMPLATE,
    **router: object,
) -> AsyncIterator[Cluster]:
    """Ends only when nothing is left in the router's tables and at no worker."""
    codec = FolderTokenizer(write_tokenizer(tmp_path / "model", template))
    async with AsyncExitStack() as stack:
        addresses = {worker.info.info.peer.worker_id: await stack.enter_async_context(running(worker)) for worker in workers}
        settings = RouterConfig.model_validate({"workers": tuple(addresses.values()), **router})
        limits = overload or OverloadConfig()
        config = Config(model=ModelConfig(name=MODEL), router=settings, security=security or SecurityConfig(), overload=limits)
        app = create_app(config, codec)
        url = await stack.enter_async_context(serving(app))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False))
        services: Services = app.state.services
        made = Cluster(url, http, services, addresses)
        if wait_ready:
            await until(lambda: not services.why_not_ready() and len(services.pool.workers) == len(workers), "ready")
            await asyncio.sleep(0)
        yield made
        await until(services.dispatcher.is_empty, "nothing left in the dispatcher")
        await until(lambda: services.admission.num_open == 0, "admission left")
        for worker in workers:
            if worker.num_links:
                await until(lambda worker=worker: not worker.open_attempts, f"nothing left at {worker.info.info.peer}")


async def until(condition: Callable[[], object], what: str, timeout_s: float = 3.0) -> None:
    """AssertionError after that many seconds of waiting (tests/patience.py)."""
    waiting = Waiting(timeout_s, 0.005)
    while not condition():
        assert not waiting.is_over(), f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


def _unchunked(payload: bytes) -> bytes:
    parts: list[bytes] = []
    while payload:
        size, _, payload = payload.partition(b"\r\n")
        parts.append(payload[: int(size, 16)])
        payload = payload[int(size, 16) + 2 :]
    return b"".join(parts)


def events_of(text: str) -> list[dict[str, object] | str]:
    """The data of each event; `[DONE]` as it stands."""
    events: list[dict[str, object] | str] = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
