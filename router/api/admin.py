"""The fleet for operators: /admin/workers, under the cluster's secret as the other control calls. Each change is logged, refused ones too.

Works at any process of a router of several: what concerns the router is passed on, and what concerns the worker its worker tells everybody.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ValidationError

from pd_serve.errors import AuthenticationError, InvalidRequestError, PdServeError
from pd_serve.protocol.admin import ADMIN_WORKERS_PATH, AddWorker, Fleet, FleetAddress, FleetWorker, RoleSwitched
from pd_serve.protocol.control import DrainRequest, RoleRequest
from router.api.internal import authorized, control_body
from router.fleet import FleetControl

MAX_BODY_NBYTES = 16 * 1024
WORKER_PATH = ADMIN_WORKERS_PATH + "/{worker_id}"
DRAIN_PATH, ROLE_PATH = f"{WORKER_PATH}/drain", f"{WORKER_PATH}/role"
BODIES: Mapping[str, type[BaseModel]] = {ADMIN_WORKERS_PATH: AddWorker, DRAIN_PATH: DrainRequest, ROLE_PATH: RoleRequest}
"""What POST takes, by path: for the description."""
_FORCE = {
    "name": "force",
    "in": "query",
    "allowEmptyValue": True,
    "schema": {"type": "boolean"},
    "description": "without waiting",
}

router = APIRouter()
audit = logging.getLogger("router.audit")
M = TypeVar("M", bound=BaseModel)


@router.get(ADMIN_WORKERS_PATH)
async def workers(request: Request) -> Fleet:
    """Linked workers, addresses without one, and what was removed."""
    return authorized(request).fleet.fleet()


@router.post(ADMIN_WORKERS_PATH, status_code=202)
async def add(request: Request) -> FleetWorker | FleetAddress:
    """Follow an address: a worker there is linked as soon as it answers, and whenever it comes back. Idempotent."""
    fleet, body = await _asked(request, AddWorker)
    with _audited(request, f"add {body.address}"):
        return fleet.add(body.address)


@router.delete(WORKER_PATH, status_code=202, openapi_extra={"parameters": [_FORCE]})
async def remove(request: Request, worker_id: str) -> FleetWorker | FleetAddress:
    """Send nothing new there, and let go of it when what runs there has ended; with `?force` at once, and what runs there is moved."""
    fleet = _fleet(request)
    is_forced = request.query_params.get("force", "false").lower() not in ("false", "0", "no")
    with _audited(request, f"remove {worker_id!r}{' by force' if is_forced else ''}"):
        return fleet.remove(worker_id, is_forced)


@router.post(DRAIN_PATH, status_code=202)
async def drain(request: Request, worker_id: str) -> FleetWorker:
    """The worker takes nothing new from any router, finishes what it has until the deadline, and ends. What is left then is moved."""
    fleet, body = await _asked(request, DrainRequest)
    with _audited(request, f"drain {worker_id!r} in {body.deadline_s:g} s"):
        return await fleet.drain(worker_id, body.deadline_s)


@router.post(ROLE_PATH)
async def role(request: Request, worker_id: str) -> RoleSwitched:
    """Switch a worker; answered when it takes the new role's work. What it has of the old one it finishes, or gives back then."""
    fleet, body = await _asked(request, RoleRequest)
    with _audited(request, f"make {worker_id!r} {body.role.value}"):
        return await fleet.set_role(worker_id, body.role, body.deadline_s, "admin")


async def _asked(request: Request, model: type[M]) -> tuple[FleetControl, M]:
    """The body is looked at only when the secret is right; an empty one stands for defaults."""
    fleet = _fleet(request)
    body = await control_body(request, MAX_BODY_NBYTES)
    try:
        return fleet, model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _fleet(request: Request) -> FleetControl:
    try:
        return authorized(request).fleet
    except AuthenticationError:
        audit.warning("%s: %s %r refused, wrong or missing secret", _who(request), request.method, request.url.path)
        raise


@contextmanager
def _audited(request: Request, what: str) -> Iterator[None]:
    try:
        yield
    except PdServeError as error:
        audit.warning("%s asked to %s: refused, %s", _who(request), what, error.message)
        raise
    audit.info("%s asked to %s: taken", _who(request), what)


def _who(request: Request) -> str:
    return request.client.host if request.client else "somebody"
