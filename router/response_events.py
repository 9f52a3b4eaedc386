"""The semantic events of a streamed response. Used by api/responses.py; the objects in them are response_draft.py's.

    created, in_progress
    -> output_item.added [content_part.added] -> deltas ... -> done of the text, of the part, of the item      for each item
    -> completed | incomplete

An item is a message, reasoning, or a call of a function, one after the other as the model says them. The first events come with the first
token: until then a failure has a status of its own. A stream that breaks ends with `response.failed`.
Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pd_serve.errors import PdServeError
from pd_serve.protocol.openai_response_answers import (
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ResponseLogprob,
    Status,
)
from pd_serve.protocol.openai_responses import ResponseModel
from router.choice import Piece
from router.response_draft import ResponseDraft, response_logprobs
from router.response_items import ItemKind, OpenItem, id_kind
from router.tokenizer import TextCodec
from router.tools.parts import CallArguments, CallBegun, Content, ParsedPiece, Part, Reasoning
from router.whole import UsageCounts

_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class _Open:
    """The item under way."""

    item: OpenItem
    item_id: str
    place: bytes
    """`item_id` and `output_index`, as JSON fields."""
    logprobs: list[ResponseLogprob]


class ResponseEvents:
    """As sse.EventWriter, of the one choice that a response has."""

    def __init__(self, codec: TextCodec, draft: ResponseDraft) -> None:
        self._codec = codec
        self._draft = draft
        self._sequence_number = 0
        self._items: list[OutputItem] = []
        self._open: _Open | None = None
        self._has_run_out = False

    def begin(self, index: int) -> bytes:
        response = b'"response":' + _dumped(self._draft.begun())
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def piece(self, index: int, piece: Piece) -> bytes:
        logprobs = () if piece.logprobs is None else response_logprobs(self._codec, [piece])
        if isinstance(piece, ParsedPiece):
            return self._parsed(piece.parts, logprobs)
        return self._content(piece.text, logprobs) if piece.text or logprobs else b""

    def texts(self, index: int, texts: list[str]) -> bytes:
        return b"".join([self._content(text, ()) for text in texts if text])

    def finish(self, index: int, reason: str) -> bytes:
        """A response without any item has an empty message."""
        self._has_run_out = reason == "length"
        begun = b"" if self._items or self._open is not None else self._began(Content)
        return begun + self._close("incomplete" if self._has_run_out else "completed")

    def usage(self, usage: UsageCounts) -> bytes:
        """The last one."""
        ended = self._draft.ended(tuple(self._items), self._has_run_out, usage)
        return self._event(b"response." + ended.status.encode(), b'"response":' + _dumped(ended))

    def broken(self, error: PdServeError) -> bytes:
        """The last one of a stream that broke."""
        return self._event(b"response.failed", b'"response":' + _dumped(self._draft.failed(error)))

    # ---- parts

    def _parsed(self, parts: tuple[Part, ...], logprobs: tuple[ResponseLogprob, ...]) -> bytes:
        """The first content of a token shows its log-probabilities."""
        events = b""
        for part in parts:
            events += self._part(part, logprobs)
            if isinstance(part, Content):
                logprobs = ()
        return events

    def _part(self, part: Part, logprobs: tuple[ResponseLogprob, ...]) -> bytes:
        match part:
            case Content(text=text):
                return self._content(text, logprobs)
            case Reasoning(text=text):
                begun, item = self._within(Reasoning)
                item.item.texts.append(text)
                delta = item.place + b',"content_index":0,"delta":' + _json(text)
                return begun + self._event(b"response.reasoning_text.delta", delta)
            case CallBegun():
                return self._close("completed") + self._began(CallBegun, part)
            case CallArguments(text=text):
                call = self._open
                assert call is not None
                call.item.texts.append(text)
                return self._event(b"response.function_call_arguments.delta", call.place + b',"delta":' + _json(text))

    def _content(self, text: str, logprobs: tuple[ResponseLogprob, ...]) -> bytes:
        begun, item = self._within(Content)
        item.item.texts.append(text)
        item.logprobs.extend(logprobs)
        fields = item.place + b',"content_index":0,"delta":%b,"logprobs":%b' % (_json(text), _list(logprobs))
        return begun + self._event(b"response.output_text.delta", fields)

    # ---- items

    def _within(self, kind: type[Content] | type[Reasoning]) -> tuple[bytes, _Open]:
        """The open item, of that kind, and the events that came of opening it."""
        item = self._open
        if item is not None and item.item.kind is kind:
            return b"", item
        events = self._close("completed") + self._began(kind)
        assert self._open is not None
        return events, self._open

    def _began(self, kind: ItemKind, call: CallBegun | None = None) -> bytes:
        index = len(self._items)
        item_id = self._draft.item_id(id_kind(kind), index)
        place = b'"item_id":%b,"output_index":%d' % (_json(item_id), index)
        item = OpenItem(kind, call)
        self._open = _Open(item, item_id, place, [])
        shown = item.made(item_id, "in_progress", is_empty=True)
        events = self._event(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, _dumped(shown)))
        if kind is Content:
            part = b',"content_index":0,"part":' + _dumped(OutputText(text=""))
            events += self._event(b"response.content_part.added", place + part)
        return events

    def _close(self, status: Status) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        index = len(self._items)
        made = item.item.made(item.item_id, status, tuple(item.logprobs))
        self._items.append(made)
        text = _json("".join(item.item.texts))
        if isinstance(made, OutputMessage):
            (part,) = made.content
            fields = item.place + b',"content_index":0,"text":%b,"logprobs":%b' % (text, _list(part.logprobs))
            events = self._event(b"response.output_text.done", fields)
            events += self._event(b"response.content_part.done", item.place + b',"content_index":0,"part":' + _dumped(part))
        elif isinstance(made, ReasoningItem):
            events = self._event(b"response.reasoning_text.done", item.place + b',"content_index":0,"text":' + text)
        else:
            events = self._event(b"response.function_call_arguments.done", item.place + b',"arguments":' + text)
        return events + self._event(b"response.output_item.done", b'"output_index":%d,"item":%b' % (index, _dumped(made)))

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number = self._sequence_number
        self._sequence_number = number + 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (kind, kind, fields, number)


def _list(logprobs: tuple[ResponseLogprob, ...]) -> bytes:
    return b"[" + b",".join(map(_dumped, logprobs)) + b"]"


def _dumped(model: ResponseModel) -> bytes:
    return model.model_dump_json().encode()
