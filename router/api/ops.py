"""GET /health, /ready and /metrics, for operators and load balancers. No key is asked for; nothing secret is shown."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from pd_serve import __version__
from pd_serve.protocol.openai_responses import VersionAnswer
from pd_serve.protocol.siblings import Answers, Topic
from router.metrics_sum import summed
from router.services import Services, services_of

router = APIRouter()


@router.get("/health")
async def health() -> JSONResponse:
    """Alive: the event loop turns."""
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> VersionAnswer:
    """Of this server."""
    return VersionAnswer(version=__version__)


@router.get("/ready", responses={503: {"description": "Cannot generate now; the reason", "content": {"application/json": {}}}})
async def ready(request: Request) -> JSONResponse:
    """Can generate, whichever process of the router is asked: 200, else 503 with the reason."""
    services = services_of(request)
    reason = services.why_not_ready()
    if not reason and services.siblings is not None:
        answers = await services.siblings.ask(Topic.READY)
        reason = next((answer.decode() for answer in answers.data if answer), _silence(answers))
    return _unavailable(reason) if reason else JSONResponse({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Of all processes of the router together: 503 rather than sums that lack one."""
    services = services_of(request)
    text = own_metrics(services)
    if services.siblings is not None:
        answers = await services.siblings.ask(Topic.METRICS)
        if silence := _silence(answers):
            return _unavailable(silence)
        text = summed((text, *(answer.decode() for answer in answers.data)))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def own_metrics(services: Services) -> str:
    """Of this process alone."""
    services.metrics.record("pd_serve_open_requests", services.occupancy.num_open)
    services.metrics.record("pd_serve_queued_requests", services.occupancy.num_queued)
    services.metrics.record("pd_serve_prefix_known_blocks", services.pool.prefixes.num_blocks)
    services.metrics.record("pd_serve_running_requests", services.dispatcher.num_open - services.dispatcher.num_queued)
    return generate_latest(services.metrics.registry).decode()


def _silence(answers: Answers) -> str:
    return f"{answers.num_silent} of this router's processes do not answer" if answers.num_silent else ""


def _unavailable(reason: str) -> JSONResponse:
    return JSONResponse({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})
