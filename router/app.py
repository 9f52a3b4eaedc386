"""The ASGI app: FastAPI, but for the two paths that nearly all requests take. Those go straight to their endpoints.

The framework's layers (exit stacks, two error catchers, matching of routes) cost about as much as all that the endpoint does with a short
request. What they would have done with an error is done here: the same answers, by the same handlers. Any other method on these paths, and
every other path, is the framework's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pd_serve.errors import PdServeError
from pd_serve.protocol.server import line_of
from router.api.errors import on_bug, on_error


class RouterApp(FastAPI):
    """`straight`: endpoints by path, for POST."""

    def __init__(self, straight: Mapping[str, ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._straight = straight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._straight.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
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
