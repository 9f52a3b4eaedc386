"""HTTP and WebSocket routes of a worker front: /link, /health, /ready, /metrics and /control. Translates; decides nothing.

The link and the control routes ask for the cluster's secret (when there is one), compared in constant time. /health, /ready and
/metrics are open, for orchestrators.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import FastAPI, Query, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from pd_serve import __version__
from pd_serve.errors import IncompatibleError, InvalidRequestError, PdServeError, ProtocolError, RequestError, UnavailableError
from pd_serve.ids import LinkId, RouterId
from pd_serve.protocol.control import (
    LINK_PATH,
    WORKER_DRAIN_PATH,
    WORKER_ROLE_PATH,
    WORKER_STATUS_PATH,
    WORKER_TRACES_PATH,
    ControlError,
    DrainRequest,
    RoleRequest,
    WorkerStatus,
)
from pd_serve.protocol.link import Role, RouterFrame, router_codec
from pd_serve.protocol.traces import Traces
from pd_serve.wire import PROTOCOL_VERSION
from workers.front_guard import CONTROL_PREFIX, ControlGuard, check_secret
from workers.front_links import Link
from workers.front_view import FrontView
from workers.host_identity import host_id

_log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 1.0
"""A router that does not read does not read the close either."""
_NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"description": "Not so; why"}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": ControlError}
    for status, text in {
        400: "Malformed",
        401: "Wrong or missing cluster secret",
        408: "Did not arrive in time",
        413: "The body is too large",
        431: "The headers are too large",
        503: "Not ready yet",
    }.items()
}
_FRAMEWORK_CODES = {404: "unknown_url", 405: "method_not_allowed"}
_POLICY_VIOLATION, _GOING_AWAY = 1008, 1001


class FrontControl(Protocol):
    """What the routes ask of the front (workers/front.py)."""

    view: FrontView

    async def open_link(self, router_id: RouterId) -> Link:
        """Once the rank is ready; the Welcome is the link's first frame."""
        ...

    async def forward(self, link_id: LinkId, frame: RouterFrame) -> None:
        """Returns when the rank keeps up."""
        ...

    def close_link(self, link: Link, reason: str) -> None: ...

    def drain(self, deadline_s: float) -> None: ...

    def set_role(self, role: Role, deadline_s: float) -> None:
        """At once; what runs in the old role has until the deadline."""
        ...

    async def traces(self, limit: int) -> Traces:
        """Raises UnavailableError when the rank does not answer."""
        ...

    def render_metrics(self) -> bytes: ...


def build_app(front: FrontControl, cluster_secret: str) -> FastAPI:
    app = FastAPI(title="pd-serve worker", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(ControlGuard, cluster_secret=cluster_secret, refuse=_error_response)
    view = front.view

    @app.exception_handler(PdServeError)
    async def on_error(_: Request, error: PdServeError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return _error_response(InvalidRequestError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def on_http_exception(_: Request, error: HTTPException) -> JSONResponse:
        code = _FRAMEWORK_CODES.get(error.status_code, "bad_request")
        return JSONResponse({"error": {"message": str(error.detail), "code": code}}, error.status_code, error.headers)

    @app.get("/health", responses=_NOT_NOW)
    async def health() -> JSONResponse:
        reason = view.unhealthy
        return JSONResponse({"status": "unhealthy" if reason else "alive", "detail": reason}, 503 if reason else 200)

    @app.get("/ready", responses=_NOT_NOW)
    async def ready() -> JSONResponse:
        reason = view.not_ready
        return JSONResponse({"ready": not reason, "detail": reason}, 503 if reason else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(front.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get(WORKER_STATUS_PATH, responses=_REFUSALS)
    async def status() -> WorkerStatus:
        return view.status()

    @app.post(WORKER_DRAIN_PATH, responses=_REFUSALS, status_code=202)
    async def drain(body: DrainRequest) -> WorkerStatus:
        front.drain(body.deadline_s)
        return view.status()

    @app.post(WORKER_ROLE_PATH, responses=_REFUSALS, status_code=202)
    async def role(body: RoleRequest) -> WorkerStatus:
        if view.welcome is None:
            raise UnavailableError("the model is loading")
        front.set_role(body.role, body.deadline_s)
        return view.status()

    @app.get(WORKER_TRACES_PATH, responses=_REFUSALS)
    async def traces(limit: Annotated[int, Query(ge=1, le=1024)] = 16) -> Response:
        found = await front.traces(limit)
        body = {"host": host_id(), "traces": _named(found), "attempts": [msgspec.structs.asdict(attempt) for attempt in found.attempts]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    @app.websocket(LINK_PATH)
    async def link(websocket: WebSocket) -> None:
        try:
            router_id = _check_router(websocket, cluster_secret)
        except PdServeError as error:
            _log.warning("refused a link from %s: %s", websocket.client.host if websocket.client else "?", error)
            await websocket.send_denial_response(_error_response(error))
            return
        await websocket.accept()
        await _serve_link(front, websocket, router_id)

    app.openapi_schema = _described(app, bool(cluster_secret))
    return app


def _described(app: FastAPI, is_secret: bool) -> dict[str, Any]:
    """FastAPI's own document, without the answer to bad input that is not ours, and with the secret."""
    document = app.openapi()
    document.setdefault("components", {})["securitySchemes"] = {"secret": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if is_secret and path.startswith(CONTROL_PREFIX):
                operation["security"] = [{"secret": []}]
    return document


async def _serve_link(front: FrontControl, websocket: WebSocket, router_id: RouterId) -> None:
    """A task per direction; the first to end, or the link's own end, ends both."""
    opening = asyncio.create_task(front.open_link(router_id))
    working: tuple[asyncio.Task[str], ...] = ()
    link: Link | None = None
    reason = "the front is stopping"
    try:
        first = asyncio.create_task(websocket.receive())
        await asyncio.wait((opening, first), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            reason = "the router left, or spoke before the Welcome"
            first.cancel()
            return
        link = opening.result()
        jobs = (_send_frames(websocket, link), _receive_frames(front, websocket, link, first), link.until_closed())
        working = tuple(asyncio.create_task(job) for job in jobs)
        done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        reason = next(iter(done)).result()
    finally:
        for task in (opening, *working):
            task.cancel()
        if link is not None:
            front.close_link(link, reason)
        await _close_socket(websocket, reason)


async def _receive_frames(front: FrontControl, websocket: WebSocket, link: Link, first: asyncio.Task[object]) -> str:
    """Why it ended."""
    decode = router_codec().decode
    message = await first
    while True:
        assert isinstance(message, dict)
        if message["type"] == "websocket.disconnect":
            return "the router closed it"
        data = message.get("bytes")
        if not isinstance(data, bytes):
            return "the router sent text"
        try:
            frame = decode(data)
        except ProtocolError as error:
            return f"the router sent a bad frame: {error}"
        await front.forward(link.link_id, frame)
        message = await websocket.receive()


async def _send_frames(websocket: WebSocket, link: Link) -> str:
    """Why it ended."""
    while (payload := await link.next_frame()) is not None:
        try:
            await websocket.send_bytes(payload)
        except (WebSocketDisconnect, RuntimeError):
            return "the router is gone"
    return link.closed or "closed"


async def _close_socket(websocket: WebSocket, reason: str) -> None:
    code = _POLICY_VIOLATION if "bad frame" in reason or "text" in reason else _GOING_AWAY
    try:
        await asyncio.wait_for(websocket.close(code, reason[:120]), CLOSE_TIMEOUT_S)
    except (WebSocketDisconnect, RuntimeError, TimeoutError):
        return


def _check_router(websocket: WebSocket, cluster_secret: str) -> RouterId:
    """Raises AuthenticationError, IncompatibleError or RequestError."""
    headers = websocket.headers
    check_secret(headers.get("authorization"), cluster_secret)
    version = headers.get("x-pd-protocol", "")
    if version != str(PROTOCOL_VERSION):
        raise IncompatibleError(f"this worker speaks protocol {PROTOCOL_VERSION}, the router {version or 'none'!s}")
    router_id = headers.get("x-pd-router", "")
    if not 0 < len(router_id) <= 128:
        raise RequestError("X-PD-Router must name the router in at most 128 characters")
    return RouterId(router_id)


def _named(traces: Traces) -> list[dict[str, object]]:
    """With the name of every value, which the frames between processes leave out."""
    asdict = msgspec.structs.asdict
    return [{**asdict(trace), "layers": [asdict(layer) for layer in trace.layers]} for trace in traces.traces]


def _error_response(error: PdServeError) -> JSONResponse:
    status = 409 if isinstance(error, IncompatibleError) else error.http_status
    message = error.message.encode("utf-8", "replace").decode()  # names of a hostile body may hold half characters
    return JSONResponse({"error": {"message": message, "code": error.code}}, status)
