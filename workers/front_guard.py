"""What stands before a front's control routes: the cluster's secret first, then the size of the body. Nothing is read for a stranger.

The framework reads and parses a body before it asks who sent it, and reads it whole, whatever its size.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pd_serve.errors import AuthenticationError, PdServeError, RequestError

CONTROL_PREFIX = "/control/"
MAX_CONTROL_NBYTES = 16 * 1024


class ControlTooLargeError(RequestError):
    code = "request_too_large"
    http_status = 413


class ControlGuard:
    """ASGI middleware. `refuse` makes the answer to an error."""

    def __init__(self, app: ASGIApp, cluster_secret: str, refuse: Callable[[PdServeError], Response]) -> None:
        self._app = app
        self._secret = cluster_secret
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            request = Request(scope, receive)
            if scope["path"].startswith(CONTROL_PREFIX):
                check_secret(request.headers.get("authorization"), self._secret)
            body = await _bounded_body(request)
        except PdServeError as error:
            await self._refuse(error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        pending = [body]

        async def again() -> Message:
            return {"type": "http.request", "body": pending.pop(), "more_body": False} if pending else await receive()

        await self._app(scope, again, send)


def check_secret(authorization: str | None, cluster_secret: str) -> None:
    """Raises AuthenticationError. The comparison takes as long for a near miss as for a far one."""
    if not cluster_secret:
        return
    given = (authorization or "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {cluster_secret}".encode()):
        raise AuthenticationError("wrong or missing cluster secret")


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_CONTROL_NBYTES:
            raise ControlTooLargeError(f"the body exceeds the limit of {MAX_CONTROL_NBYTES} bytes")
    return bytes(body)
