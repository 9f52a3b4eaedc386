"""Errors as the OpenAI API shows them: shape, status and headers, for the tree's errors and the framework's alike."""

from __future__ import annotations

import math

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pd_serve.errors import InvalidRequestError, NotFoundError, PdServeError, UnavailableError
from pd_serve.protocol.openai import error_body
from router.services import Services, services_of
from router.tenants import RateLimitError


class UnknownPathError(NotFoundError):
    code = "unknown_url"


class MethodError(InvalidRequestError):
    code = "method_not_allowed"
    http_status = 405


class RefusedError(InvalidRequestError):
    """Whatever else the framework refuses."""

    code = "bad_request"


def error_response(error: PdServeError) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, RateLimitError):
        headers |= error.headers
    if isinstance(error, UnavailableError):
        if math.isfinite(error.retry_after_s):
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        else:
            headers["x-should-retry"] = "false"  # as OpenAI tells its own clients
    elif error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.http_status == 503:
        headers["retry-after"] = "1"
    return Response(error_body(error).model_dump_json(), error.http_status, headers, "application/json")


def header_lines(response: Response) -> bytes:
    """Whole lines, but for the length."""
    return b"".join([b"%b: %b\r\n" % header for header in response.raw_headers if header[0] != b"content-length"])


def refusal(services: Services, path: str, error: PdServeError) -> Response:
    """The answer to a request that ends with an error before any response began."""
    if path.startswith("/v1/"):
        services.metrics.count("pd_serve_requests_total", str(error.http_status))
    return error_response(error)


async def on_error(request: Request, error: Exception) -> Response:
    """An error of the tree raised by a handler, before any response began."""
    assert isinstance(error, PdServeError)
    return refusal(services_of(request), request.url.path, error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await on_error(request, UnknownPathError(f"Unknown request URL: {request.method} {request.url.path}"))
    if error.status_code == 405:
        return await on_error(request, MethodError(f"Not allowed: {request.method} {request.url.path}"))
    return await on_error(request, RefusedError(str(error.detail)))


async def on_invalid(request: Request, error: Exception) -> Response:
    """A parameter of a path or query that the framework checks: 400 as for those that we do."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return await on_error(request, InvalidRequestError(f"Invalid value for '{name}': {first['msg']}", name))


async def on_bug(request: Request, error: Exception) -> Response:
    """Anything else: the text of it stays in the log."""
    return await on_error(request, PdServeError("internal error"))
