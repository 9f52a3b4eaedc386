"""Server-sent events of a stream, as bytes. The hot path: everything but the text of a token is prepared once per request.

Source: https://platform.openai.com/docs/api-reference/chat-streaming; https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from pd_serve.errors import PdServeError
from pd_serve.protocol.openai import error_body
from router.choice import Piece, chat_logprobs, completion_logprobs
from router.tokenizer import TextCodec
from router.whole import UsageCounts, tail_json, usage_json

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.encode


class EventWriter(Protocol):
    """Events of one stream, one method per kind; each returns whole events, ready to send."""

    def begin(self, index: int) -> bytes:
        """What comes before a choice's first token."""
        ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """Empty when the token shows nothing yet."""
        ...

    def texts(self, index: int, texts: list[str]) -> bytes:
        """Events of tokens that have no more to show than these; an empty one shows nothing yet."""
        ...

    def finish(self, index: int, reason: str) -> bytes: ...

    def usage(self, usage: UsageCounts) -> bytes: ...


def error_event(error: PdServeError) -> bytes:
    """The last event of a stream that broke; no finish and no [DONE] follow."""
    return b"data: " + error_body(error).model_dump_json().encode() + b"\n\n"


class ChatEvents:
    def __init__(self, codec: TextCodec, head: bytes, include_usage: bool) -> None:
        self._codec = codec
        self._head = head
        self._end = b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._end
        self._starts: dict[int, bytes] = {}

    def begin(self, index: int) -> bytes:
        return self._start(index) + b'"role":"assistant","content":""' + self._plain_end

    def piece(self, index: int, piece: Piece) -> bytes:
        if piece.logprobs is None:
            if not piece.text:
                return b""
            return self._start(index) + b'"content":' + _json(piece.text) + self._plain_end
        logprobs = chat_logprobs(self._codec, [piece]).model_dump_json().encode()
        text = b'"content":' + _json(piece.text)
        return self._start(index) + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._end

    def texts(self, index: int, texts: list[str]) -> bytes:
        start, end = self._start(index) + b'"content":', self._plain_end
        return b"".join([start + _json(text) + end for text in texts if text])

    def finish(self, index: int, reason: str) -> bytes:
        return self._start(index) + b'},"logprobs":null,"finish_reason":' + _json(reason) + b"}" + self._end

    def usage(self, usage: UsageCounts) -> bytes:
        return self._head + b'"choices":[],"usage":' + usage_json(usage) + b"}\n\n"

    def _start(self, index: int) -> bytes:
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._head + b'"choices":[{"index":%d,"delta":{' % index
        return start


class CompletionEvents:
    def __init__(self, codec: TextCodec, head: bytes, include_usage: bool, echoes: tuple[str, ...]) -> None:
        """`echoes`: for each choice, the text of its prompt to show before it (may be empty)."""
        self._codec = codec
        self._head = head
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]
        self._end = b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._end
        self._starts = tuple(head + b'"choices":[{"index":%d,"text":' % index for index in range(len(echoes)))

    def begin(self, index: int) -> bytes:
        echo = self._echoes[index]
        return self._starts[index] + _json(echo) + self._plain_end if echo else b""

    def piece(self, index: int, piece: Piece) -> bytes:
        if piece.logprobs is None:
            self._offsets[index] += len(piece.text)
            return self._starts[index] + _json(piece.text) + self._plain_end if piece.text else b""
        logprobs = completion_logprobs(self._codec, [piece], self._offsets[index]).model_dump_json().encode()
        self._offsets[index] += len(piece.text)
        return self._starts[index] + _json(piece.text) + b',"logprobs":' + logprobs + b',"finish_reason":null}' + self._end

    def texts(self, index: int, texts: list[str]) -> bytes:
        self._offsets[index] += sum(map(len, texts))
        start, end = self._starts[index], self._plain_end
        return b"".join([start + _json(text) + end for text in texts if text])

    def finish(self, index: int, reason: str) -> bytes:
        return self._starts[index] + b'"","logprobs":null,"finish_reason":' + _json(reason) + b"}" + self._end

    def usage(self, usage: UsageCounts) -> bytes:
        return self._head + b'"choices":[],"usage":' + usage_json(usage) + b"}\n\n"


def event_head(response_id: str, kind: str, created: int, model: str) -> bytes:
    """The beginning shared by all events of a stream, up to its choices."""
    return b'data: {"id":%b,"object":%b,"created":%d,"model":%b,%b' % (
        _json(response_id),
        _json(kind),
        created,
        _json(model),
        tail_json(kind),
    )
