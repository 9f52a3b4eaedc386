"""The semantic events of a streamed response, and the response object in them. Used by api/responses.py.

    created, in_progress, output_item.added, content_part.added -> output_text.delta ...
        -> output_text.done, content_part.done, output_item.done -> completed | incomplete

All at once begin with the first token: until then a failure has a status of its own. One that breaks ends with `response.failed`.
Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from pd_serve.errors import PdServeError
from pd_serve.protocol.openai_response_api import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningTold,
    ResponseFailure,
    ResponseLogprob,
    ResponseLogprobTop,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from router.choice import Piece, chat_logprobs
from router.tokenizer import TextCodec
from router.tools.parts import content_of
from router.whole import UsageCounts

_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """What is known of an answer before its first token."""

    response_id: str
    item_id: str
    created: int
    model: str
    asked: ResponseRequest

    def begun(self) -> ResponseObject:
        return self._told("in_progress")

    def failed(self, error: PdServeError) -> ResponseObject:
        return self._told("failed").model_copy(update={"error": ResponseFailure(message=error.message)})

    def ended(self, message: OutputMessage, usage: UsageCounts) -> ResponseObject:
        told = self._told("completed")
        changes: dict[str, object] = {"output": (message,), "usage": _usage(usage), "completed_at": int(time.time())}
        if message.status == "incomplete":
            changes |= {"status": "incomplete", "incomplete_details": IncompleteDetails(), "completed_at": None}
        return told.model_copy(update=changes)

    def message(self, text: str, logprobs: tuple[ResponseLogprob, ...], finish_reason: str) -> OutputMessage:
        status = "incomplete" if finish_reason == "length" else "completed"
        return OutputMessage(id=self.item_id, status=status, content=(OutputText(text=text, logprobs=logprobs),))

    def _told(self, status: str) -> ResponseObject:
        asked = self.asked
        return ResponseObject.model_validate(
            {
                "id": self.response_id,
                "created_at": self.created,
                "status": status,
                "instructions": asked.instructions,
                "max_output_tokens": asked.max_output_tokens,
                "model": self.model,
                "output": (),
                "parallel_tool_calls": asked.parallel_tool_calls,
                "prompt_cache_key": asked.prompt_cache_key,
                "reasoning": ReasoningTold(effort=asked.reasoning.effort),
                "safety_identifier": asked.safety_identifier,
                "temperature": asked.temperature,
                "text": asked.text.model_dump(by_alias=True, exclude_none=True),
                "top_logprobs": asked.top_logprobs,
                "top_p": asked.top_p,
                "usage": None,
                "user": asked.user,
                "metadata": asked.metadata,
            }
        )


class ResponseEvents:
    """As sse.EventWriter, of the one choice that a response has."""

    def __init__(self, codec: TextCodec, draft: ResponseDraft) -> None:
        self._codec = codec
        self._draft = draft
        self._sequence_number = 0
        self._texts: list[str] = []
        self._logprobs: list[ResponseLogprob] = []
        self._message: OutputMessage | None = None
        self._place = b'"item_id":%b,"output_index":0,"content_index":0' % _json(draft.item_id)

    def begin(self, index: int) -> bytes:
        response = b'"response":' + _dumped(self._draft.begun())
        item = OutputMessage(id=self._draft.item_id, status="in_progress", content=())
        return b"".join(
            (
                self._event(b"response.created", response),
                self._event(b"response.in_progress", response),
                self._event(b"response.output_item.added", b'"output_index":0,"item":' + _dumped(item)),
                self._event(b"response.content_part.added", self._place + b',"part":' + _dumped(OutputText(text=""))),
            )
        )

    def piece(self, index: int, piece: Piece) -> bytes:
        text = content_of(piece)
        self._texts.append(text)
        if piece.logprobs is None:
            return self._delta(text, b"[]") if text else b""
        named = response_logprobs(self._codec, [piece])
        self._logprobs += named
        return self._delta(text, b"[" + b",".join(map(_dumped, named)) + b"]")

    def texts(self, index: int, texts: list[str]) -> bytes:
        self._texts += texts
        return b"".join([self._delta(text, b"[]") for text in texts if text])

    def finish(self, index: int, reason: str) -> bytes:
        text = "".join(self._texts)
        self._message = message = self._draft.message(text, tuple(self._logprobs), reason)
        (part,) = message.content
        logprobs = b"[" + b",".join(map(_dumped, part.logprobs)) + b"]"
        return b"".join(
            (
                self._event(b"response.output_text.done", self._place + b',"text":%b,"logprobs":%b' % (_json(text), logprobs)),
                self._event(b"response.content_part.done", self._place + b',"part":' + _dumped(part)),
                self._event(b"response.output_item.done", b'"output_index":0,"item":' + _dumped(message)),
            )
        )

    def usage(self, usage: UsageCounts) -> bytes:
        """The last one."""
        assert self._message is not None
        ended = self._draft.ended(self._message, usage)
        return self._event(b"response." + ended.status.encode(), b'"response":' + _dumped(ended))

    def broken(self, error: PdServeError) -> bytes:
        """The last one of a stream that broke."""
        return self._event(b"response.failed", b'"response":' + _dumped(self._draft.failed(error)))

    def _delta(self, text: str, logprobs: bytes) -> bytes:
        return self._event(b"response.output_text.delta", self._place + b',"delta":%b,"logprobs":%b' % (_json(text), logprobs))

    def _event(self, kind: bytes, fields: bytes) -> bytes:
        number = self._sequence_number
        self._sequence_number = number + 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (kind, kind, fields, number)


def response_logprobs(codec: TextCodec, pieces: list[Piece]) -> tuple[ResponseLogprob, ...]:
    return tuple(
        ResponseLogprob(
            token=named.token,
            logprob=named.logprob,
            bytes=named.bytes,
            top_logprobs=tuple(ResponseLogprobTop(token=top.token, logprob=top.logprob, bytes=top.bytes) for top in named.top_logprobs),
        )
        for named in chat_logprobs(codec, pieces).content
    )


def _usage(usage: UsageCounts) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _dumped(model: ResponseObject | OutputMessage | OutputText | ResponseLogprob) -> bytes:
    return model.model_dump_json().encode()
