"""The items of a response as its parts come, one after the other: the same whether it is streamed (response_events.py) or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pd_serve.protocol.openai_response_answers import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseLogprob,
    Status,
)
from router.choice import Piece
from router.tools.parts import CallArguments, CallBegun, Content, ParsedPiece, Reasoning

ItemKind = type[Content] | type[Reasoning] | type[CallBegun]


@dataclass(slots=True)
class OpenItem:
    """What is known of an item so far. `pieces`: whose log-probabilities it shows."""

    kind: ItemKind
    call: CallBegun | None = None
    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def made(self, item_id: str, status: Status, logprobs: tuple[ResponseLogprob, ...] = (), is_empty: bool = False) -> OutputItem:
        text = "".join(self.texts)
        if self.call is not None:
            return FunctionCallItem(id=item_id, call_id=self.call.call_id, name=self.call.name, arguments=text, status=status)
        if self.kind is Reasoning:
            return ReasoningItem(id=item_id, status=status, content=() if is_empty else (ReasoningText(text=text),))
        return OutputMessage(id=item_id, status=status, content=() if is_empty else (OutputText(text=text, logprobs=logprobs),))


def id_kind(kind: ItemKind) -> str:
    """What ids of such items begin with."""
    return {Content: "msg", Reasoning: "rs", CallBegun: "fc"}[kind]


def read_items(pieces: list[Piece]) -> list[OpenItem]:
    """Of a whole answer, in the order in which the model said them; at least one, an empty message where it said nothing."""
    items: list[OpenItem] = []

    def within(kind: type[Content] | type[Reasoning]) -> OpenItem:
        if not items or items[-1].kind is not kind:
            items.append(OpenItem(kind))
        return items[-1]

    for piece in pieces:
        is_told = False
        for part in _parts(piece):
            match part:
                case Content(text=text):
                    message = within(Content)
                    message.texts.append(text)
                    if not is_told:
                        message.pieces.append(piece)
                    is_told = True
                case Reasoning(text=text):
                    within(Reasoning).texts.append(text)
                case CallBegun():
                    items.append(OpenItem(CallBegun, part))
                case CallArguments(text=text):
                    items[-1].texts.append(text)
    return items or [OpenItem(Content)]


def _parts(piece: Piece) -> Iterator[Content | Reasoning | CallBegun | CallArguments]:
    if isinstance(piece, ParsedPiece):
        yield from piece.parts
    elif piece.text or piece.logprobs is not None:
        yield Content(piece.text)
