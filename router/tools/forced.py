"""Calls that the client asks for: the grammar of pd_serve.protocol.openai_tools.forced_form, whatever format the model would choose."""

from __future__ import annotations

from router.tools.base import Calls
from router.tools.call_object import read_call
from router.tools.reading import Reading, expect, read_container, visible


class RequiredCallsFormat:
    """`[{"name": ..., "arguments": {...}}, ...]`"""

    special_tokens: tuple[str, ...] = ()
    has_short_ids = True

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return ("[",) if is_start else ()

    def read(self, marker: str, calls: Calls) -> Reading:
        ch = ","
        while ch != "]":
            yield from expect(",", ch)
            yield from expect("{", (yield from visible()))
            yield from read_call(calls)
            ch = yield from visible()


class NamedCallFormat:
    """The arguments of one function, and nothing else."""

    special_tokens: tuple[str, ...] = ()
    has_short_ids = True

    def __init__(self, name: str) -> None:
        self._name = name

    def markers(self, is_start: bool) -> tuple[str, ...]:
        return ("{",) if is_start else ()

    def read(self, marker: str, calls: Calls) -> Reading:
        calls.begin(self._name)
        yield from read_container(marker, calls.arguments)
        calls.end()
