"""A router in an event loop of its own, for clients that block or bring their own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from tests.fakes_worker import MockWorker, mock_worker
from tests.unit.router.cluster import Cluster, cluster


@contextmanager
def serving_elsewhere(folder: Path, *workers: MockWorker, security: SecurityConfig | None = None, **router: object) -> Iterator[Cluster]:
    """With one worker for both phases, where none are given."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = AsyncExitStack()

    async def begin() -> Cluster:
        return await stack.enter_async_context(cluster(folder, *(workers or (mock_worker(role=Role.BOTH),)), security=security, **router))

    try:
        yield asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
