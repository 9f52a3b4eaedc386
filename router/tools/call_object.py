"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, which most formats have in some frame. Llama's say `parameters`."""

from __future__ import annotations

import json

from router.surrogates import without_halves
from router.tools.base import Calls
from router.tools.reading import NotACallError, Reading, ReadingOn, expect, nothing, read_container, read_literal, read_scalar, read_string
from router.tools.reading import visible as next_visible

NO_ARGUMENTS = "{}"
_ARGUMENTS = ("arguments", "parameters")


def read_call(calls: Calls, is_known_only: bool = False) -> Reading:
    """After its opening brace, to its closing one. The call begins as soon as its name and the first of its arguments are known.

    Arguments that come before the name are held back till then; those in a string are taken out of it. Other keys are passed over.
    `is_known_only`: an object that names no function of the client is no call.
    """
    name = ""
    arguments = ""
    has_begun = False
    ch = yield from next_visible()
    while True:
        if ch != '"':
            raise NotACallError
        key = yield from _read_text()
        yield from expect(":", (yield from next_visible()))
        ch = yield from next_visible()
        if key == "name" and ch == '"' and not name:
            name = yield from _read_text()
            if not name or (is_known_only and not calls.knows(name)):
                raise NotACallError
            ch = yield from next_visible()
        elif key in _ARGUMENTS and not arguments and not has_begun:
            if ch == "{" and name:
                has_begun = True
                calls.begin(name)
                yield from read_container(ch, calls.arguments)
            else:
                arguments = yield from _read_arguments(ch)
            ch = yield from next_visible()
        else:
            ch = yield from _pass_over(ch)
        if ch == "}":
            break
        if ch != ",":
            raise NotACallError
        ch = yield from next_visible()
    if not name:
        raise NotACallError
    if not has_begun:
        calls.begin(name)
        calls.arguments(arguments or NO_ARGUMENTS)
    calls.end()


def _read_text() -> ReadingOn:
    """The value of a JSON string, after its opening quote; it can be encoded. Nothing is read beyond it."""
    raw: list[str] = []
    yield from read_string(raw.append)
    return without_halves(str(json.loads("".join(raw))))


def _read_arguments(ch: str) -> ReadingOn:
    """The JSON of an object: as it stands, or in a string; null is one without members. Nothing is read beyond it."""
    if ch == "{":
        raw: list[str] = []
        yield from read_container(ch, raw.append)
        return "".join(raw)
    if ch == "n":
        yield from read_literal(ch, nothing)
        return NO_ARGUMENTS
    if ch != '"':
        raise NotACallError
    text = yield from _read_text()
    try:
        is_object = isinstance(json.loads(text or NO_ARGUMENTS), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise NotACallError
    return text or NO_ARGUMENTS


def _pass_over(ch: str) -> ReadingOn:
    """Any value; ends with the visible character after it."""
    if ch in ("{", "["):
        yield from read_container(ch, nothing)
        return (yield from next_visible())
    return (yield from read_scalar(ch, nothing))
