"""The ASGI app: FastAPI, but for the few paths that nearly all requests take. Those go straight to their endpoints.

The framework's layers (exit stacks, two error catchers, matching of routes) cost about as much as all that the endpoint does with a short
request. What they would have done with an error is done here: the same answers, by the same handlers. Any other method on these paths, and
every other path, is the framework's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pd_serve.errors import PdServeError
from pd_serve.protocol.server import line_of
from router.api.errors import header_lines, on_bug, on_error, refusal
from router.request_head import head_of, sending

logger = logging.getLogger(__name__)


class StraightEndpoint(Protocol):
    """An endpoint outside the framework; see api/generate.py."""

    def at_once(self, scope: Scope, body: bytes) -> bool: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class RouterApp(FastAPI):
    """`straight`: endpoints by path, for POST."""

    def __init__(self, straight: Mapping[str, StraightEndpoint], **settings: Any) -> None:
        super().__init__(**settings)
        self._straight = straight

    def answer_at_once(self, scope: Scope, body: bytes) -> bool:
        """As pd_serve.protocol.server.AtOnce: a POST that is there as a whole. A root of callbacks."""
        endpoint = self._straight.get(scope["path"])
        if endpoint is None:
            return False
        scope["app"] = self
        try:
            return endpoint.at_once(scope, body)
        except PdServeError as error:
            refused = error
        except Exception:
            logger.exception("%s failed", scope["path"])
            refused = PdServeError("internal error")
        line = line_of(scope)
        if line.has_begun:
            line.cut()
        else:
            response = refusal(self.state.services, scope["path"], refused)
            lines = header_lines(response) + head_of(scope, self.state.services.cors).lines
            line.answer(lines, bytes(response.body), response.status_code)
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        cors = self.state.services.cors
        preflight = None if cors is None else cors.preflight(scope)
        if preflight is not None:
            await preflight(scope, receive, send)
            return
        send = sending(send, head_of(scope, cors).lines)
        endpoint = self._straight.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        try:
            await endpoint(scope, receive, send)
        except PdServeError as error:
            await (await on_error(Request(scope), error))(scope, receive, send)
        except Exception as error:
            if not line_of(scope).has_begun:
                await (await on_bug(Request(scope), error))(scope, receive, send)
            raise
