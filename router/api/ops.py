"""GET /health, /ready and /metrics, for operators and load balancers. No key is asked for; nothing secret is shown."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response

from router.services import services_of

router = APIRouter()


@router.get("/health")
async def health() -> JSONResponse:
    """Alive: the event loop turns."""
    return JSONResponse({"status": "ok"})


@router.get("/ready", responses={503: {"description": "Cannot generate now; the reason", "content": {"application/json": {}}}})
async def ready(request: Request) -> JSONResponse:
    """Can generate: 200, else 503 with the reason."""
    reason = services_of(request).why_not_ready()
    if reason:
        return JSONResponse({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})
    return JSONResponse({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    services = services_of(request)
    services.metrics.record("pd_serve_open_requests", services.admission.num_open)
    services.metrics.record("pd_serve_queued_requests", services.dispatcher.num_queued)
    return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)
