"""The phases of one request, for the client that asked (`X-Request-Timeline: 1`): a header of a whole answer, a comment in a stream.

A comment is what every reader of server-sent events skips, the SDKs' among them; a field would be in the way of strict ones.
Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (lines that begin with a colon).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.request_head import TIMELINE
from router.timeline import Record, told

MAX_NBYTES = 6_000
"""Common clients take lines of headers up to 8190 bytes."""


def phases_line(request_id: str, records: Sequence[Record]) -> bytes:
    """As a header line."""
    return b"%b: %b\r\n" % (TIMELINE, phases_json(request_id, records))


def phases_event(request_id: str, records: Sequence[Record]) -> bytes:
    """As a comment of a stream."""
    return b": %b %b\n\n" % (TIMELINE, phases_json(request_id, records))


def phases_json(request_id: str, records: Sequence[Record]) -> bytes:
    """One entry per choice, as GET /internal/v1/requests tells it but for what is null or empty; the last ones are left out where all would
    be too long, and `left_out` says how many. ASCII, one line.
    """
    choices: list[str] = []
    nbytes = 0
    for record in records:
        choice = json.dumps(told(record).model_dump(exclude_none=True, exclude={"request_id"}), separators=(",", ":"))
        nbytes += len(choice)
        if nbytes > MAX_NBYTES:
            break
        choices.append(choice)
    left_out = len(records) - len(choices)
    end = f',"left_out":{left_out}' if left_out else ""
    return f'{{"request_id":{json.dumps(request_id)},"choices":[{",".join(choices)}]{end}}}'.encode()
