"""GET /ui: the live page. Static files of router/ui, read once; they hold nothing secret, and ask for the rest as their user is allowed to.

The page runs its own scripts and styles alone, talks to this router alone, and is shown in no frame. Source: https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

UI_PATH = "/ui"
_PAGE = "index.html"
_TYPES: Mapping[str, str] = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


def ui_routes() -> list[BaseRoute]:
    """The page at /ui and /ui/, and each of its files."""
    routes: list[BaseRoute] = []
    for file in sorted(files("router").joinpath("ui").iterdir(), key=lambda file: file.name):
        kind = _TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            endpoint = _Page(file.read_bytes(), kind)
            paths = (f"{UI_PATH}/{file.name}", *((UI_PATH, f"{UI_PATH}/") if file.name == _PAGE else ()))
            routes += [Route(path, endpoint.answer, methods=["GET"], include_in_schema=False) for path in paths]
    return routes


class _Page:
    def __init__(self, body: bytes, kind: str) -> None:
        self._body = body
        self._headers = {**_HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
        self._kind = f"{kind}; charset=utf-8"

    async def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers, media_type=self._kind)
