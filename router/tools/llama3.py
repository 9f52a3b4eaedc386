"""Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` as the whole answer or after `<|python_tag|>`, several with semicolons between.

An answer that is JSON without a tag is a call only where it names a function that the client has told of.
Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/ (JSON based tool calling).
"""

from __future__ import annotations

from router.tools.base import Calls
from router.tools.call_object import read_call
from router.tools.reading import Reading, expect, visible

_TAG = "<|python_tag|>"


class Llama3Format:
    special_tokens = (_TAG,)
    has_short_ids = False

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return (_TAG, "{") if is_start else (_TAG,)

    def read(self, marker: str, calls: Calls) -> Reading:
        is_tagged = marker == _TAG
        if is_tagged:
            yield from expect("{", (yield from visible()))
        while True:
            yield from read_call(calls, is_known_only=not is_tagged)
            yield from expect(";", (yield from visible()))
            yield from expect("{", (yield from visible()))
