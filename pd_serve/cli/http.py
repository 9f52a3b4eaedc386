"""Plain HTTP of the commands that talk to a running system: every failure is one line that says what to do next."""

from __future__ import annotations

import httpx

from pd_serve.errors import PdServeError
from pd_serve.tls import tls_trouble


class EndpointError(PdServeError):
    """The endpoint is not there, or answered with an error."""

    code = "endpoint_error"


def unreachable(url: str, error: httpx.HTTPError | httpx.InvalidURL) -> EndpointError:
    if trouble := tls_trouble(error):
        return EndpointError(f"cannot reach {url}: {trouble}")
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:"):
        return EndpointError(f"cannot reach {url}: {reason}; where it speaks TLS its address begins with https://")
    return EndpointError(f"cannot reach {url}: {reason}; is it running? (pd-serve up starts one here)")


def refused(url: str, status_code: int, body: str) -> EndpointError:
    """The message of an OpenAI-style error body, where there is one."""
    try:
        message = str(httpx.Response(status_code, text=body).json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = " ".join(body.split())[:200]
    return EndpointError(f"{url} answered {status_code}: {message}")
