"""A look at the sizes of a large body before it is parsed. Parsing costs about a microsecond per number, on the event loop: millions of
token ids, messages or biases would hold up every other client for seconds, to be refused in the end. Here their commas are counted.

What is not counted here (texts, wrong types, broken JSON) the parser finds quickly, and says better what is wrong.
"""

from __future__ import annotations

import msgspec

from pd_serve.config import RouterConfig
from pd_serve.errors import InvalidRequestError
from pd_serve.protocol.openai import MAX_PROMPTS, MAX_TEMPLATE_KWARGS
from pd_serve.protocol.openai_response_api import MAX_METADATA
from router.admission import Limits

LONG_BODY = 65_536
"""Bytes; nothing in a shorter body can take long."""
MAX_TOOLS_NBYTES = 2**20
"""Of `tools`, as they came; schemas take longer to parse than text."""
MAX_MEMBERS = 16_384
"""Parts of contents and calls, of all messages together."""
MAX_FIELDS = 128
"""Of one object; no endpoint knows so many."""
_NUMBER = frozenset(b"-0123456789")


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])
_MOST_MEMBERS = {"chat_template_kwargs": MAX_TEMPLATE_KWARGS, "metadata": MAX_METADATA}


def check_sizes(body: bytes, limits: Limits, router: RouterConfig) -> None:
    """Raises ContextLengthError or InvalidRequestError for what is longer than anything that could be taken."""
    if len(body) < LONG_BODY:
        return
    try:
        given = {name: bytes(value) for name, value in _object.decode(body).items()}
        if len(given) > MAX_FIELDS:
            raise InvalidRequestError(f"the body may have at most {MAX_FIELDS} parameters")
        num_prompts, num_ids = _count_prompts(given.get("prompt", b""))
        for param in ("messages", "input"):
            _check_messages(given.get(param, b""), param, router.max_messages)
        for param, most in _MOST_MEMBERS.items():
            if given.get(param, b"").startswith(b"{") and len(_object.decode(given[param])) > most:
                raise InvalidRequestError(f"'{param}' may have at most {most} members", param)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if len(given.get("tools", b"")) > MAX_TOOLS_NBYTES:
        raise InvalidRequestError(f"'tools' may have at most {MAX_TOOLS_NBYTES} bytes", "tools")
    if given.get("logit_bias", b"").count(b",") >= max(1, router.max_logit_bias):
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
    """Of items as well. Up to the first that is none, where the parser stops. Raises InvalidRequestError."""
    if messages[:1] != b"[" or b"{" not in messages:
        return
    entries = _list.decode(messages)
    if len(entries) > most:
        raise InvalidRequestError(f"'{param}' may hold at most {most} {'messages' if param == 'messages' else 'items'}", param)
    num_members = 0
    for entry in entries:
        if bytes(entry)[:1] != b"{":
            return
        fields = _fields(entry, param)
        for name in ("content", "tool_calls", "output"):
            part = fields.get(name)
            if part is None or bytes(part)[:1] != b"[":
                continue
            members = _list.decode(part)
            num_members += len(members)
            if num_members > MAX_MEMBERS:
                raise InvalidRequestError(f"'{param}' may hold at most {MAX_MEMBERS} parts and calls", param)
            for member in members:
                if bytes(member)[:1] != b"{":
                    break
                _fields(member, param)


def _fields(value: msgspec.Raw, param: str) -> dict[str, msgspec.Raw]:
    """Raises InvalidRequestError: the parser would name each that does not belong there."""
    fields = _object.decode(value)
    if len(fields) > MAX_FIELDS:
        raise InvalidRequestError(f"'{param}' holds an object with more than {MAX_FIELDS} fields", param)
    return fields
