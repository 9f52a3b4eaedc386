"""DeepSeek V3 and R1, whose calls have a fence around their arguments, and V3.1, whose calls have none.

    all      <｜tool▁calls▁begin｜>CALL CALL ...<｜tool▁calls▁end｜>
    V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

R1 sometimes leaves out the outer marks. Source: the chat templates of DeepSeek-V3, DeepSeek-R1 and DeepSeek-V3.1.
"""

from __future__ import annotations

from router.tools.base import Calls
from router.tools.reading import END, NotACallError, Reading, ReadingOn, expect, read_container, visible

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_KIND = "function"
_FENCE = "```"
_MAX_NAME = 256
_ONE = len("<｜tool▁call")
"""Up to here the marks of one call and of all are the same."""


class DeepSeekFormat:
    special_tokens = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
    has_short_ids = False

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return (_CALLS_BEGIN, _CALL_BEGIN)

    def read(self, marker: str, calls: Calls) -> Reading:
        if marker == _CALLS_BEGIN:
            yield from expect(_CALL_BEGIN, (yield from visible()))
        while True:
            yield from _read_call(calls)
            ch = yield from visible()
            yield from expect(_CALL_BEGIN[:_ONE], ch)
            ch = yield
            if ch == "s":
                yield from expect(_CALLS_END[_ONE:], ch)
                return
            yield from expect(_CALL_BEGIN[_ONE:], ch)


def _read_call(calls: Calls) -> Reading:
    name = yield from _read_up_to(_SEPARATOR)
    ch = yield from visible()
    is_fenced = ch != "{"
    if is_fenced:
        if name != _KIND:
            raise NotACallError
        name = ch + (yield from _read_up_to("\n"))
        ch = yield from visible()
        yield from expect(_FENCE + "json", ch)
        ch = yield from visible()
    if ch != "{" or not name:
        raise NotACallError
    calls.begin(name)
    yield from read_container(ch, calls.arguments)
    ch = yield from visible()
    if is_fenced:
        yield from expect(_FENCE, ch)
        ch = yield from visible()
    yield from expect(_CALL_END, ch)
    calls.end()


def _read_up_to(end: str) -> ReadingOn:
    """The text before `end`, without space around it. Nothing is read beyond that."""
    text = ""
    while not text.endswith(end):
        ch = yield
        if ch == END or len(text) > _MAX_NAME:
            raise NotACallError
        text += ch
    return text.removesuffix(end).strip()
