"""Runs plans against an endpoint: at their times (open loop), or a fixed number at once (closed loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pd_serve.bench.client import Endpoint
from pd_serve.bench.records import RequestPlan, RequestRecord

_T = TypeVar("_T")

OnRecord = Callable[[RequestRecord], None]
"""Called with each record as its request ends; progress bars hang on it."""


def no_progress(record: RequestRecord) -> None:
    """For callers that show nothing."""


async def open_loop(
    endpoint: Endpoint, plans: Sequence[RequestPlan], progress: OnRecord = no_progress, start: float | None = None
) -> list[RequestRecord]:
    """Sends each plan at its time whatever became of the ones before; returns when all have ended, records by index.

    A sequence other than a list or tuple has to be in the order of time: its plans are made one by one, as they are sent.
    `start`: time.monotonic() from which the times count; None: now. How late requests went out is in the records (`statistics.offered`).
    """
    start = time.monotonic() if start is None else start
    ordered = sorted(plans, key=lambda plan: plan.at_s) if isinstance(plans, list | tuple) else plans
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for plan in ordered:
            delay_s = start + plan.at_s - time.monotonic()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.append(group.create_task(_one(endpoint, plan, start, progress)))
    return sorted((task.result() for task in tasks), key=lambda record: record.index)


async def closed_loop(
    endpoint: Endpoint, plans: Sequence[RequestPlan], concurrency: int, progress: OnRecord = no_progress, start: float | None = None
) -> list[RequestRecord]:
    """Keeps `concurrency` requests open until the plans are used up; returns when all have ended, records by index."""
    start = time.monotonic() if start is None else start
    waiting = iter(plans)
    records: dict[int, RequestRecord] = {}

    async def slot() -> None:
        for plan in waiting:
            records[plan.index] = await _one(endpoint, plan, start, progress)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(plans))):
            group.create_task(slot())
    return [records[index] for index in sorted(records)]


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """As asyncio.run, on uvloop where it is installed: the client shares the machine with what it measures."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def _one(endpoint: Endpoint, plan: RequestPlan, start: float, progress: OnRecord) -> RequestRecord:
    record = await endpoint.stream(plan, start)
    progress(record)
    return record
