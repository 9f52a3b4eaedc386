"""What an answer consists of once it has been read: content, reasoning, and calls of tools. Plain data between parsers and writers."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from router.choice import Piece


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    index: int
    """Of the calls of its choice, from 0."""
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """All of a call put together are JSON, unless its call broke off."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


class ParsedPiece(Piece, frozen=True, gc=False):
    """`text` is what the token said; the parts are what became certain with it."""

    parts: tuple[Part, ...] = ()


class PartList:
    """Collects parts; texts of one kind that come together become one part."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._texts: list[str] = []
        self._call = -1
        """Whose arguments the texts are; -1: content."""

    def content(self, text: str) -> None:
        self._text(-1, text)

    def arguments(self, call: int, text: str) -> None:
        self._text(call, text)

    def begun(self, call: int, call_id: str, name: str) -> None:
        self._close()
        self._parts.append(CallBegun(call, call_id, name))

    def take(self) -> tuple[Part, ...]:
        self._close()
        parts, self._parts = tuple(self._parts), []
        return parts

    def _text(self, call: int, text: str) -> None:
        if call != self._call:
            self._close()
            self._call = call
        self._texts.append(text)

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._parts.append(Content(text) if self._call < 0 else CallArguments(self._call, text))


@dataclass(slots=True)
class WholeCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """All parts of a choice put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)


def whole_answer(pieces: list[Piece]) -> WholeAnswer:
    answer = WholeAnswer()
    content: list[str] = []
    reasoning: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        for part in piece.parts if isinstance(piece, ParsedPiece) else ():
            match part:
                case Content(text=text):
                    content.append(text)
                case Reasoning(text=text):
                    reasoning.append(text)
                case CallBegun(call_id=call_id, name=name):
                    answer.calls.append(WholeCall(call_id, name))
                    arguments.append([])
                case CallArguments(index=index, text=text):
                    arguments[index].append(text)
    for call, texts in zip(answer.calls, arguments, strict=True):
        call.arguments = "".join(texts)
    answer.content, answer.reasoning = "".join(content), "".join(reasoning)
    return answer
