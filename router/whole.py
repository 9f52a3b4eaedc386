"""Whole answers as bytes, as sse.py has streams: put together from parts, since a model of each answer would cost more than all the rest.

Their shape is stated by protocol/openai_responses.py, and tests hold them against it.
Source: https://platform.openai.com/docs/api-reference (chat, completions).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from pd_serve import __version__

SYSTEM_FINGERPRINT = f"fp_{hashlib.blake2b(__version__.encode(), digest_size=5).hexdigest()}"
"""The same seed may give another answer where this differs: of another version."""

_json = msgspec.json.encode


class UsageCounts(NamedTuple):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Of completion_tokens; None: not told apart."""


def usage_json(usage: UsageCounts) -> bytes:
    details = b"" if usage.reasoning_tokens is None else b',"completion_tokens_details":{"reasoning_tokens":%d}' % usage.reasoning_tokens
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}%b}' % (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        usage.cached_tokens,
        details,
    )


def tail_json(kind: str) -> bytes:
    """What stands between an answer's model and its choices: the tier is chat's alone."""
    tier = b',"service_tier":"default"' if kind.startswith("chat.") else b""
    return b'"system_fingerprint":%b%b,' % (_json(SYSTEM_FINGERPRINT), tier)


class WholeHead(NamedTuple):
    """What stands in an answer before its choices."""

    response_id: str
    kind: str
    created: int
    model: str


def whole_json(head: WholeHead, choices: list[bytes], usage: UsageCounts) -> bytes:
    return b'{"id":%b,"object":%b,"created":%d,"model":%b,%b"choices":[%b],"usage":%b}' % (
        _json(head.response_id),
        _json(head.kind),
        head.created,
        _json(head.model),
        tail_json(head.kind),
        b",".join(choices),
        usage_json(usage),
    )


def chat_choice_json(index: int, text: str, logprobs: bytes, finish_reason: str) -> bytes:
    """`logprobs`: ChatLogprobs as JSON, or null."""
    return b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":%b,"finish_reason":%b}' % (
        index,
        _json(text),
        logprobs,
        _json(finish_reason),
    )


def completion_choice_json(index: int, text: str, logprobs: bytes, finish_reason: str) -> bytes:
    """`logprobs`: CompletionLogprobs as JSON, or null."""
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (index, _json(text), logprobs, _json(finish_reason))
