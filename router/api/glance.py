"""A look at the sizes of a large body before it is parsed. Parsing costs about a microsecond per number, on the event loop: millions of
token ids, messages or biases would hold up every other client for seconds, to be refused in the end. Here their commas are counted.

What is not counted here (texts, wrong types, broken JSON) the parser finds quickly, and says better what is wrong.
"""

from __future__ import annotations

import msgspec

from pd_serve.config import RouterConfig
from pd_serve.errors import InvalidRequestError
from pd_serve.protocol.openai import MAX_PROMPTS
from router.admission import Limits

LONG_BODY = 65_536
"""Bytes; nothing in a shorter body can take long."""
_NUMBER = frozenset(b"-0123456789")


class _Parts(msgspec.Struct):
    """Unparsed; empty where absent."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    logit_bias: msgspec.Raw = msgspec.Raw(b"")


_parts = msgspec.json.Decoder(_Parts)
_list = msgspec.json.Decoder(list[msgspec.Raw])


def check_sizes(body: bytes, limits: Limits, router: RouterConfig) -> None:
    """Raises ContextLengthError or InvalidRequestError for what is longer than anything that could be taken."""
    if len(body) < LONG_BODY:
        return
    try:
        parts = _parts.decode(body)
        num_prompts, num_ids = _count_prompts(bytes(parts.prompt))
        num_messages = _count_messages(bytes(parts.messages), router.max_messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if num_messages > router.max_messages:
        raise InvalidRequestError(f"'messages' may hold at most {router.max_messages} messages", "messages")
    if bytes(parts.logit_bias).count(b",") >= max(1, router.max_logit_bias):
        raise InvalidRequestError(f"'logit_bias' may name at most {router.max_logit_bias} tokens", "logit_bias")
    if num_prompts > MAX_PROMPTS:
        raise InvalidRequestError(f"'prompt' must hold 1 to {MAX_PROMPTS} prompts", "prompt")
    limits.check_length(num_ids, "prompt")


def _count_prompts(prompt: bytes) -> tuple[int, int]:
    """(at least so many prompts, token ids of the longest; 0 where they are texts)"""
    inside = prompt[1:].lstrip()[:1] if prompt[:1] == b"[" else b""
    if inside == b"[":
        num_prompts = prompt.count(b"[") - 1
        if num_prompts > MAX_PROMPTS:
            return num_prompts, 0
        return num_prompts, max(bytes(part).count(b",") for part in _list.decode(prompt)) + 1
    if inside == b'"':
        return (prompt.count(b'"') - prompt.count(b'\\"')) // 2, 0
    return 1, prompt.count(b",") + 1 if inside and inside[0] in _NUMBER else 0


def _count_messages(messages: bytes, most: int) -> int:
    """Exact only where there may be more than `most`."""
    return 0 if messages.count(b'"role"') <= most else len(_list.decode(messages))
