"""Answers with calls and reasoning as bytes: stream events as router/sse.py has them, and whole choices as router/whole.py.

Source: https://platform.openai.com/docs/api-reference/chat-streaming; `reasoning_content` as DeepSeek's API has it:
https://api-docs.deepseek.com/guides/reasoning_model
"""

from __future__ import annotations

import msgspec

from router.choice import Piece, chat_logprobs
from router.sse import ChatEvents
from router.tools.parts import CallArguments, CallBegun, Content, ParsedPiece, Part, Reasoning, whole_answer

_json = msgspec.json.encode


class ParsedChatEvents(ChatEvents):
    """An event for each part. The first of a token carries its log-probabilities; where there is no part, an event of its own does."""

    def begin(self, index: int) -> bytes:
        return self._start(index) + b'"role":"assistant","content":null' + self._plain_end

    def piece(self, index: int, piece: Piece) -> bytes:
        deltas = [_delta(part) for part in piece.parts] if isinstance(piece, ParsedPiece) else []
        start, end = self._start(index), self._plain_end
        if piece.logprobs is None:
            return b"".join([start + delta + end for delta in deltas])
        logprobs = chat_logprobs(self._codec, [piece]).model_dump_json().encode()
        first = start + (deltas[0] if deltas else b"") + b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._end
        return first + b"".join([start + delta + end for delta in deltas[1:]])


def _delta(part: Part) -> bytes:
    match part:
        case Content(text=text):
            return b'"content":' + _json(text)
        case Reasoning(text=text):
            return b'"reasoning_content":' + _json(text)
        case CallBegun(index=index, call_id=call_id, name=name):
            return b'"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]' % (
                index,
                _json(call_id),
                _json(name),
            )
        case CallArguments(index=index, text=text):
            return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, _json(text))


def parsed_choice_json(index: int, pieces: list[Piece], logprobs: bytes, finish_reason: str) -> bytes:
    """`logprobs`: ChatLogprobs as JSON, or null."""
    answer = whole_answer(pieces)
    has_more = bool(answer.calls or answer.reasoning)
    message = b'"role":"assistant","content":' + (b"null" if has_more and not answer.content else _json(answer.content))
    if answer.reasoning:
        message += b',"reasoning_content":' + _json(answer.reasoning)
    message += b',"refusal":null'
    if answer.calls:
        calls = [
            b'{"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}'
            % (_json(call.call_id), _json(call.name), _json(call.arguments))
            for call in answer.calls
        ]
        message += b',"tool_calls":[' + b",".join(calls) + b"]"
    return b'{"index":%d,"message":{%b},"logprobs":%b,"finish_reason":%b}' % (index, message, logprobs, _json(finish_reason))
