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
MAX_TOOLS_NBYTES = 2**20
"""Of `tools`, as they came; schemas take longer to parse than text."""
MAX_MEMBERS = 16_384
"""Parts of contents and calls, of all messages together."""
_NUMBER = frozenset(b"-0123456789")


class _Parts(msgspec.Struct):
    """Unparsed; empty where absent."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    logit_bias: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    """Of a chat, or an item of a response's input: what of it may be a list."""

    content: msgspec.Raw = msgspec.Raw(b"")
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")


_parts = msgspec.json.Decoder(_Parts)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_message = msgspec.json.Decoder(_Message)


def check_sizes(body: bytes, limits: Limits, router: RouterConfig) -> None:
    """Raises ContextLengthError or InvalidRequestError for what is longer than anything that could be taken."""
    if len(body) < LONG_BODY:
        return
    try:
        parts = _parts.decode(body)
        num_prompts, num_ids = _count_prompts(bytes(parts.prompt))
        for param, given in (("messages", parts.messages), ("input", parts.input)):
            _check_messages(bytes(given), param, router.max_messages)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if len(bytes(parts.tools)) > MAX_TOOLS_NBYTES:
        raise InvalidRequestError(f"'tools' may have at most {MAX_TOOLS_NBYTES} bytes", "tools")
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


def _check_messages(messages: bytes, param: str, most: int) -> None:
    """Raises InvalidRequestError. Each item, part and call is an object, but braces may stand in texts as well: then they are counted."""
    num_braces = messages.count(b"{")
    if messages[:1] != b"[" or num_braces <= min(most, MAX_MEMBERS):
        return
    entries = _list.decode(messages)
    if len(entries) > most:
        raise InvalidRequestError(f"'{param}' may hold at most {most} {'messages' if param == 'messages' else 'items'}", param)
    if num_braces > MAX_MEMBERS and _count_members(entries) > MAX_MEMBERS:
        raise InvalidRequestError(f"'{param}' may hold at most {MAX_MEMBERS} parts and calls", param)


def _count_members(entries: list[msgspec.Raw]) -> int:
    """Up to the first message that is none, where the parser stops."""
    num = 0
    for entry in entries:
        try:
            message = _message.decode(entry)
            num += sum(
                [len(_list.decode(part)) for part in (message.content, message.tool_calls, message.output) if bytes(part)[:1] == b"["]
            )
        except msgspec.MsgspecError:
            break
    return num
