"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with or without lines between.

Source: https://github.com/NousResearch/Hermes-Function-Calling; the chat templates of Qwen 2.5 and 3.
"""

from __future__ import annotations

from router.tools.base import Calls
from router.tools.call_object import read_call
from router.tools.reading import Reading, expect, visible

_BEGIN = "<tool_call>"
_END = "</tool_call>"


class HermesFormat:
    special_tokens = (_BEGIN, _END)
    has_short_ids = False

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return (_BEGIN,)

    def read(self, marker: str, calls: Calls) -> Reading:
        ch = yield from visible()
        yield from expect("{", ch)
        while ch == "{":
            yield from read_call(calls)
            ch = yield from visible()
        yield from expect(_END, ch)
