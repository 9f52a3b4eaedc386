"""Heartbeats of a worker to one router: how a router, new or restarted, learns of its workers. One task per URL in the front's loop.

A router that is down is normal (any start order, any restart): said once when it goes and once when it is back. While the router
holds a link the link speaks for the worker, so heartbeats are rare then; the front hastens one when a link ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from pydantic import ValidationError

from pd_serve.ids import RouterId
from pd_serve.protocol.control import REGISTER_PATH, Registered, RegisterWorker
from pd_serve.tls import tls_trouble

_log = logging.getLogger(__name__)
_REQUEST_TIMEOUT_S = 5.0
_LINKED_HEARTBEATS = 10
"""While linked, one heartbeat of so many is made."""


@dataclass(frozen=True, slots=True)
class RegistrarSettings:
    cluster_secret: str
    heartbeat_s: float
    tls: ssl.SSLContext | None = None
    """For routers at https://; None: the system's authorities."""


class Registrar:
    """Registers every `heartbeat_s` (rarely while linked), and at once when hastened."""

    def __init__(
        self,
        router_url: str,
        settings: RegistrarSettings,
        current: Callable[[], RegisterWorker],
        is_linked: Callable[[RouterId], bool],
    ) -> None:
        self._url = router_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {settings.cluster_secret}"} if settings.cluster_secret else {}
        self._tls = True if settings.tls is None else settings.tls
        self._heartbeat_s = settings.heartbeat_s
        self._current = current
        self._is_linked = is_linked
        self._router_id: RouterId | None = None
        """As the router called itself when it last answered."""
        self._trouble = ""
        self._wake = asyncio.Event()

    def hasten(self) -> None:
        """Register at once: something that routers are told has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False, verify=self._tls
        ) as client:
            while True:
                self._note(await self._register(client))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._interval_s())
                self._wake.clear()

    def _interval_s(self) -> float:
        is_linked = not self._trouble and self._router_id is not None and self._is_linked(self._router_id)
        return self._heartbeat_s * (_LINKED_HEARTBEATS if is_linked else 1)

    async def _register(self, client: httpx.AsyncClient) -> str:
        """What went wrong, in words; empty when the router took the registration."""
        try:
            reply = await client.post(
                REGISTER_PATH, content=self._current().model_dump_json(), headers={"Content-Type": "application/json"}
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"is not reachable ({tls_trouble(error) or f'{type(error).__name__}: {error}'})"
        if reply.status_code != httpx.codes.OK:
            return f"refused this worker with {reply.status_code}: {reply.text[:300]}"
        try:
            self._router_id = RouterId(Registered.model_validate_json(reply.content).router_id)
        except ValidationError:
            return f"answered a registration with something else: {reply.text[:120]!r}"
        return ""

    def _note(self, trouble: str) -> None:
        if trouble and not self._trouble:
            _log.warning("router %s %s; trying again every %g s", self._url, trouble, self._heartbeat_s)
        elif self._trouble and not trouble:
            _log.info("registered at router %s", self._url)
        self._trouble = trouble
