"""What workers noted of recent requests, asked of their fronts when somebody looks: never on a request's way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from pd_serve.errors import PdServeError
from pd_serve.protocol.client import ControlClient
from pd_serve.protocol.control import RequestTimeline
from pd_serve.protocol.worker_traces import parse_told
from router.linked_worker import LinkedWorker
from router.services import Services
from router.waterfall import Noted

MOST_TRACES = 1024
"""As many as a front tells at once."""
ANSWER_TIMEOUT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of this host; empty where there is none: then no worker counts as one of the same host."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def workers_of(requests: Iterable[RequestTimeline]) -> frozenset[str]:
    """As the timeline names them."""
    attempts = [attempt for request in requests for attempt in request.attempts]
    return frozenset(name for attempt in attempts for name in (attempt.prefill, attempt.decode) if name is not None)


async def noted_by(services: Services, names: Iterable[str]) -> Mapping[str, Noted]:
    """Of these workers, as far as they are linked. Raises nothing: one that does not answer has a detail instead."""
    linked = {str(worker.peer): worker for worker in services.pool.workers}
    wanted = [(name, linked[name]) for name in names if name in linked]
    found = await asyncio.gather(*(_ask(services, worker) for _, worker in wanted))
    return {name: noted for (name, _), noted in zip(wanted, found, strict=True)}


async def _ask(services: Services, worker: LinkedWorker) -> Noted:
    secret = services.config.security.cluster_secret
    try:
        async with ControlClient(worker.address, secret, ANSWER_TIMEOUT_S, services.worker_tls) as client:
            return Noted(parse_told(await client.traces(MOST_TRACES)))
    except (PdServeError, msgspec.MsgspecError) as error:
        return Noted(None, f"its traces are not to be had: {error}")
