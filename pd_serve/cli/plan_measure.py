"""Watching a running system for `pd-serve plan ratio --measure`: the /metrics of its router and of every worker, once a second."""

from __future__ import annotations

import sys
import time

import httpx
from pydantic import ValidationError

from pd_serve.cli.http import EndpointError, refused, unreachable
from pd_serve.config import SecurityConfig
from pd_serve.plan.errors import PlanError
from pd_serve.plan.measured import Measured, Reading, measured, read_metrics, seen_by_router, worker_window
from pd_serve.protocol.control import STATUS_PATH, RouterStatus
from pd_serve.tls import client_tls

_TIMEOUT_S = 10.0
_LOOK_S = 1.0
_METRICS = "/metrics"


class _Watch:
    def __init__(self, http: httpx.Client, router: str) -> None:
        self._http = http
        self._router = router

    def status(self, secret: str) -> RouterStatus:
        """`secret`: the cluster's, which nobody else is shown; empty: none."""
        text = self._get(self._router + STATUS_PATH, {"Authorization": f"Bearer {secret}"} if secret else {})
        try:
            return RouterStatus.model_validate_json(text)
        except ValidationError as error:
            raise EndpointError(f"{self._router} is not a pd-serve router of this version") from error

    def look(self, address: str) -> Reading:
        return read_metrics(self._get(address + _METRICS))

    def _get(self, url: str, headers: dict[str, str] | None = None) -> str:
        try:
            reply = self._http.get(url, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(url, error) from error
        if reply.is_error:
            raise refused(url, reply.status_code, reply.text)
        return reply.text


def watch(router: str, security: SecurityConfig, seconds: float, itl_slo_s: float) -> Measured:
    """Blocks for `seconds`. Raises EndpointError for what cannot be asked, PlanError where nothing is there to be measured."""
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=client_tls(security)) as http:
        return observe(http, router.rstrip("/"), security.cluster_secret, seconds, itl_slo_s)


def observe(http: httpx.Client, router: str, secret: str, seconds: float, itl_slo_s: float) -> Measured:
    """As watch, by a client of the caller's."""
    source = _Watch(http, router)
    workers = source.status(secret).workers
    if not workers:
        raise PlanError(f"{router} has no workers")
    print(f"watching {len(workers)} workers of {router} for {seconds:g} s", file=sys.stderr)
    began = time.monotonic()
    before = source.look(router)
    looks: dict[str, list[Reading]] = {worker.id: [] for worker in workers}
    while True:
        looked_at = time.monotonic()
        for worker in workers:
            looks[worker.id].append(source.look(worker.address))
        left_s = began + seconds - time.monotonic()
        if left_s <= 0 and len(looks[workers[0].id]) > 1:
            break
        time.sleep(max(0.0, min(_LOOK_S - (time.monotonic() - looked_at), left_s)))
    after = source.look(router)
    windows = [worker_window(worker.id, worker.role, looks[worker.id]) for worker in workers]
    return measured(windows, seen_by_router(before, after), time.monotonic() - began, itl_slo_s)
