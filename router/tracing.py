"""Requests that have ended become traces: collected, their workers asked once for all of a moment, spans made (router/otel.py).

Nothing here exists while `observe.otlp_endpoint` is empty. Owned by the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from router.timeline import Record, told
from router.waterfall import Noted, waterfall
from router.worker_traces import boot_id, workers_of

if TYPE_CHECKING:
    from router.otel import RequestSpans

logger = logging.getLogger(__name__)

MAX_WAITING = 4096
"""Of requests that have ended; above, the oldest get no trace."""
COLLECT_S = 1.0
"""Workers are asked at most so often, and by then have noted what they note."""

AskWorkers = Callable[[Iterable[str]], Awaitable[Mapping[str, Noted]]]


class Tracing:
    """ended() at once -> spans within about COLLECT_S; close() sends what is left."""

    def __init__(self, spans: RequestSpans, ask: AskWorkers, collect_s: float = COLLECT_S) -> None:
        self._spans = spans
        self._ask = ask
        self._collect_s = collect_s
        self._waiting: deque[Record] = deque(maxlen=MAX_WAITING)
        self._has_some = asyncio.Event()
        self._boot_id = boot_id()
        self._task = asyncio.create_task(self._run(), name="tracing")

    def ended(self, record: Record) -> None:
        self._waiting.append(record)
        self._has_some.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._flush()
        await asyncio.to_thread(self._spans.close)

    async def _run(self) -> None:
        """A task root: what is wrong with traces is logged, and requests go on."""
        while True:
            await self._has_some.wait()
            await asyncio.sleep(self._collect_s)
            try:
                await self._flush()
            except Exception:
                logger.exception("requests that ended get no traces")

    async def _flush(self) -> None:
        from router.otel import EndedRequest

        self._has_some.clear()
        records, self._waiting = self._waiting, deque(maxlen=MAX_WAITING)
        if not records:
            return
        requests = [told(record) for record in records]
        noted = await self._ask(workers_of(requests))
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for record, request in zip(records, requests, strict=True):
            way = waterfall(request, noted, self._boot_id)
            arrived_at_ns = epoch_ns + round(record.arrived_at * 1e9)
            self._spans.emit(EndedRequest(way, record.traceparent, request.received_s, arrived_at_ns, record.num_output_tokens))
