"""Which web pages of other origins may ask this router, by `router.cors_origins`. Starlette's middleware decides; it wraps nothing here.

Answers on the paths that nearly all requests take are written without the framework, so a wrapper would not see them: their header lines
are made once per request instead (request_head.py). Source: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_METHODS = ("GET", "HEAD", "POST")
_LIMITS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
_EXPOSED = ", ".join(("retry-after", "x-request-id", "x-request-timeline", *_LIMITS))


class Cors:
    """`origins`: those let in, such as `https://chat.example.org`; `*` is any. Cookies are never asked for: keys come in a header."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._rules = CORSMiddleware(_nothing, allow_origins=origins, allow_methods=_METHODS, allow_headers=("*",))

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser's question before the request; None: it is none."""
        headers = Headers(scope=scope)
        if scope["method"] != "OPTIONS" or "origin" not in headers or "access-control-request-method" not in headers:
            return None
        return self._rules.preflight_response(headers)

    def lines(self, origin: bytes) -> bytes:
        """Header lines of an answer to a page of `origin` (empty: no page)."""
        text = origin.decode("latin-1")
        if not origin or not self._rules.is_allowed_origin(text):
            return b"vary: origin\r\n"
        allowed = b"*" if self._rules.allow_all_origins else origin
        exposed = _EXPOSED.encode()
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\nvary: origin\r\n" % (allowed, exposed)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    return None
