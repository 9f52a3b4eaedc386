"""Mistral: `[TOOL_CALLS]` and a list, `[{"name": ..., "arguments": {...}}, ...]`; later `[TOOL_CALLS]name{...}` for each call.

Between name and arguments there may be `[CALL_ID]`, which is passed over, and `[ARGS]`. All of these are special tokens.
Source: https://github.com/mistralai/mistral-common (tokenizers/instruct.py, InstructTokenizerV3 to V13).
"""

from __future__ import annotations

from router.tools.base import Calls
from router.tools.call_object import read_call
from router.tools.reading import SPACE, NotACallError, Reading, ReadingOn, expect, read_container, visible

_BEGIN = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_MAX_NAME = 256


class MistralFormat:
    special_tokens = (_BEGIN, _CALL_ID, _ARGUMENTS)
    has_short_ids = True

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return (_BEGIN,)

    def read(self, marker: str, calls: Calls) -> Reading:
        ch = yield from visible()
        if ch != "[":
            yield from _read_named(ch, calls)
            return
        while True:
            yield from expect("{", (yield from visible()))
            yield from read_call(calls)
            ch = yield from visible()
            if ch == "]":
                return
            yield from expect(",", ch)


def _read_named(ch: str, calls: Calls) -> Reading:
    name: list[str] = []
    ch = yield from _read_word(ch, name)
    if ch == "[":
        ch = yield
        if ch == "C":
            yield from expect(_CALL_ID[1:], ch)
            call_id: list[str] = []
            ch = yield from _read_word((yield), call_id)
            yield from expect("[", ch)
            ch = yield
        yield from expect(_ARGUMENTS[1:], ch)
        ch = yield from visible()
    if ch != "{" or not name:
        raise NotACallError
    calls.begin("".join(name))
    yield from read_container(ch, calls.arguments)
    calls.end()


def _read_word(ch: str, letters: list[str]) -> ReadingOn:
    """Ends with the first visible character that is none of it."""
    while ch in _NAME and len(letters) < _MAX_NAME:
        letters.append(ch)
        ch = yield
    return (yield from visible()) if ch in SPACE else ch
