"""Registration of workers, the cluster's status, recent requests; under the cluster secret where there is one (always beyond loopback)."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import ValidationError

from pd_serve.errors import AuthenticationError, InvalidRequestError
from pd_serve.protocol.control import (
    REGISTER_PATH,
    REQUESTS_PATH,
    STATUS_PATH,
    RecentRequests,
    Registered,
    RegisterWorker,
    RouterStatus,
)
from pd_serve.protocol.siblings import Topic
from router.admission import bearer_matches, read_body
from router.pairs import pair_statuses
from router.services import Services, services_of

MAX_REGISTRATION_NBYTES = 16 * 1024

router = APIRouter()


@router.post(REGISTER_PATH)
async def register(request: Request) -> Registered:
    services = authorized(request)
    body = await control_body(request, MAX_REGISTRATION_NBYTES)
    try:
        worker = RegisterWorker.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    linked = services.pool.register(worker)
    if services.siblings is not None:
        services.siblings.registered(worker)
    return Registered(router_id=services.router_id, heartbeat_s=services.config.worker.heartbeat_s, linked=linked)


@router.get(STATUS_PATH)
async def status(request: Request) -> RouterStatus:
    services = authorized(request)
    return RouterStatus(
        router_id=services.router_id,
        model=services.model_name,
        open_requests=services.occupancy.num_open,
        queued_requests=services.occupancy.num_queued,
        workers=services.pool.statuses(),
        pairs=pair_statuses(services.pool.workers, services.pool.refused()),
    )


@router.get(REQUESTS_PATH)
async def requests(request: Request) -> RecentRequests:
    return await recent_requests(authorized(request))


async def recent_requests(services: Services) -> RecentRequests:
    """Of all processes of the router that answer, newest first."""
    recent = services.dispatcher.timeline.recent()
    if services.siblings is None:
        return recent
    answers = await services.siblings.ask(Topic.REQUESTS)
    others = (told for answer in answers.data for told in RecentRequests.model_validate_json(answer).requests)
    return RecentRequests(requests=tuple(sorted((*recent.requests, *others), key=lambda told: told.arrived_at_s, reverse=True)))


async def control_body(request: Request, max_nbytes: int) -> bytes:
    """JSON that says so, which no browser sends to other sites unasked: where no secret is needed, any page could else give orders.

    Nothing at all may be sent by who is no browser. Raises InvalidRequestError.
    """
    body = await read_body(request.scope, request.receive, max_nbytes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and (body or "origin" in request.headers):
        raise InvalidRequestError("the body has to be JSON, and to say so: 'Content-Type: application/json'", "content-type")
    return body


def authorized(request: Request) -> Services:
    services = services_of(request)
    secret = services.config.security.cluster_secret
    if secret and not bearer_matches(request.headers.get("authorization"), (secret.encode(),)):
        raise AuthenticationError("wrong or missing cluster secret")
    return services
