"""What the headers of a request ask for besides its body: its id, the phases of its answer, leave for a web page to read it.

Read once per request, in one pass over its headers. Who asks (`authorization`) is admission's to know.
"""

from __future__ import annotations

import random
import re
import secrets
from typing import NamedTuple

from starlette.types import Message, Scope, Send

from router.cors import Cors
from router.tenants import NO_TICKET, Ticket

REQUEST_ID = b"x-request-id"
TIMELINE = b"x-request-timeline"
TRACEPARENT = b"traceparent"

_taken = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch
"""Ids of clients that are taken as they are: bounded and printable, since logs and headers show them."""
_drawing = random.Random(secrets.randbits(256))
"""Ids have to differ, not to be secret, and drawing them costs no call of the system."""


class RequestHead(NamedTuple):
    request_id: str
    """As the client gave it in x-request-id, else drawn here. In every answer, in the log, and in the router's record of the request."""
    lines: bytes = b""
    """Header lines of every answer to it, whole."""
    wants_timeline: bool = False
    """`X-Request-Timeline: 1`"""
    traceparent: str = ""
    """As given; its reader checks it. Source: https://www.w3.org/TR/trace-context/"""
    ticket: Ticket = NO_TICKET
    """Of admission, once that was entered."""


def head_of(scope: Scope, cors: Cors | None) -> RequestHead:
    """Of an HTTP request."""
    given = origin = timeline = traceparent = b""
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            given = value
        elif name == TIMELINE:
            timeline = value
        elif name == b"origin":
            origin = value
        elif name == TRACEPARENT:
            traceparent = value
    request_id = given if _taken(given) else b"req_%024x" % _drawing.getrandbits(96)
    lines = b"x-request-id: %b\r\n" % request_id
    if cors is not None:
        lines += cors.lines(origin)
    return RequestHead(request_id.decode(), lines, timeline == b"1", traceparent.decode("latin-1"))


def sending(send: Send, lines: bytes) -> Send:
    """`send`, with these header lines in the answer's head."""
    headers = [tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n") if line]

    async def send_with_lines(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return send_with_lines
