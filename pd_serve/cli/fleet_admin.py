"""The admin API of a router (words in protocol/admin.py), as one command of `pd-serve workers` calls it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from pd_serve.cli.http import EndpointError, refused, unreachable
from pd_serve.config import SecurityConfig
from pd_serve.protocol.admin import ADMIN_WORKERS_PATH, AddWorker, Fleet, FleetAddress, FleetWorker
from pd_serve.tls import client_tls

T = TypeVar("T")
_LOOK_S = 0.2
_HTTP_TIMEOUT_S = 15.0
_PLACE: TypeAdapter[FleetWorker | FleetAddress] = TypeAdapter(FleetWorker | FleetAddress)


class FleetAdmin:
    """One command's calls."""

    def __init__(self, router: str, security: SecurityConfig) -> None:
        self._url = router.rstrip("/")
        headers = {"Authorization": f"Bearer {security.cluster_secret}"} if security.cluster_secret else {}
        self._http = httpx.Client(
            base_url=self._url, headers=headers, timeout=_HTTP_TIMEOUT_S, trust_env=False, verify=client_tls(security)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def fleet(self) -> Fleet:
        return self.call("GET", "", None, Fleet.model_validate_json)

    def add(self, address: str) -> FleetWorker | FleetAddress:
        try:
            body = AddWorker(address=address)
        except ValidationError as error:
            raise EndpointError(f"{address}: {error.errors(include_url=False)[0]['msg']}") from error
        return self.call("POST", "", body, _PLACE.validate_json)

    def remove(self, worker: str, force: bool) -> FleetWorker | FleetAddress:
        return self.call("DELETE", f"/{quote(worker, safe='')}{'?force' if force else ''}", None, _PLACE.validate_json)

    def call(self, method: str, path: str, body: BaseModel | None, parse: Callable[[bytes], T]) -> T:
        """Raises EndpointError, with the router's own words where it refused."""
        content = None if body is None else body.model_dump_json()
        try:
            reply = self._http.request(method, ADMIN_WORKERS_PATH + path, content=content, headers={"content-type": "application/json"})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise unreachable(self._url, error) from error
        if reply.is_error:
            raise refused(self._url, reply.status_code, reply.text)
        try:
            return parse(reply.content)
        except ValidationError as error:
            raise EndpointError(f"{self._url} is not a pd-serve router of this version") from error

    def wait(self, is_so: Callable[[Fleet], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not is_so(self.fleet()):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True
