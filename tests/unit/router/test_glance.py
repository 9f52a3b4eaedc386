"""Large bodies: what could never be taken is refused before it is parsed, what could is left to the parser."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import pytest
from pydantic import BaseModel, ValidationError

from pd_serve.config import RouterConfig
from pd_serve.errors import ContextLengthError, InvalidRequestError, RequestError
from pd_serve.protocol.openai import MAX_PARTS, ChatCompletionRequest, CompletionRequest, parse_chat, parse_completion
from pd_serve.protocol.openai_response_api import ResponseRequest, parse_response
from pd_serve.protocol.openai_tokens import DetokenizeRequest, TokenizeRequest
from router.admission import Limits
from router.api.glance import LONG_BODY, MAX_MEMBERS, MAX_TOOLS_NBYTES, check_sizes

LIMITS = Limits(30_000, 30_000, 50_000)
MESSAGE = {"role": "user", "content": "role"}
QUOTES = ['"' * 500, "\\" * 500, "a, b" * 300] * 80


def body(**fields: object) -> bytes:
    data = json.dumps({"model": "m", **fields}).encode()
    assert len(data) > LONG_BODY
    return data


def takes_less_than(seconds: float, refuse: Callable[[], object]) -> bool:
    """Of the processor, in one of some tries: other threads of this process count as well, and a busy machine is slower."""
    for _ in range(5):
        began = time.thread_time()
        with contextlib.suppress(RequestError):
            refuse()
        if time.thread_time() - began < seconds:
            return True
    return False


def listed(part: object, times: int) -> bytes:
    """A list of so many of a part, as JSON; written without making the list."""
    text = json.dumps(part).encode()
    return b"[" + (text + b", ") * (times - 1) + text + b"]"


TOO_MUCH: dict[str, tuple[str, Callable[[], bytes]]] = {
    "ids": ("prompt", lambda: listed(5, 5_000_000)),
    "bad ids": ("prompt", lambda: listed(-5, 3_000_000)),
    "mixed": ("prompt", lambda: b'[5, "x"' + b', 5, "x"' * 999_999 + b"]"),
    "ids of one prompt": ("prompt", lambda: b"[" + listed(5, 30_000) + b", [5]]"),
    "prompts of ids": ("prompt", lambda: listed([1], 1_000_000)),
    "prompts": ("prompt", lambda: listed("x", 2_000_000)),
    "messages": ("messages", lambda: listed(MESSAGE, 200_000)),
    "biases": ("logit_bias", lambda: b'{"0": 0' + b"".join(b', "%d": 0' % number for number in range(1, 500_000)) + b"}"),
}


@pytest.mark.parametrize(("param", "write"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_millions_of_parts_are_refused_in_no_time(param: str, write: Callable[[], bytes]) -> None:
    others = b'"prompt": "x", ' if param == "logit_bias" else b""
    data = b'{"model": "m", ' + others + b'"%s": ' % param.encode() + write() + b"}"
    assert len(data) > LONG_BODY
    with pytest.raises(RequestError) as refused:
        check_sizes(data, LIMITS, RouterConfig())
    assert takes_less_than(0.5, lambda: check_sizes(data, LIMITS, RouterConfig()))
    assert (refused.value.param, refused.value.http_status) == (param, 400)
    assert isinstance(refused.value, ContextLengthError | InvalidRequestError)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5] * 29_999},
        {"prompt": [[5] * 29_999] * 3},
        {"prompt": QUOTES},
        {"prompt": "[1,2" * 30_000},
        {"prompt": ["[" * 300] * 256},
        {"messages": [MESSAGE] * 2048},
        {"messages": [{"role": "user", "content": '"role"' * 20_000}]},
        {"messages": [{"role": "user", "content": "{" * 70_000}] * 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "{}"}] * 4_000}] * 4},
        {"prompt": "x" * LONG_BODY, "logit_bias": {str(number): 0 for number in range(1024)}},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_may_be_taken_passes(fields: dict[str, object]) -> None:
    data = body(**fields)
    check_sizes(data, LIMITS, RouterConfig())
    (parse_chat if "messages" in fields else parse_completion)(data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff" * 100_000, b'{"prompt": ' + b"[" * 100_000, b'{"messages": 5}' + b" " * 70_000])
def test_nonsense_is_left_to_the_parser(data: bytes) -> None:
    check_sizes(data, LIMITS, RouterConfig())
    with pytest.raises(InvalidRequestError):
        parse_completion(data)


PART, CALL = {"type": "text", "text": ""}, {"function": {"name": "f", "arguments": ""}}
TOO_MANY: dict[str, tuple[str, list[object]]] = {
    "reasoning": ("input", [{"type": "reasoning"}] * 5_000),
    "outputs": ("input", [{"type": "function_call_output", "call_id": "c", "output": [PART] * 6_000}] * 3),
    "parts of items": ("input", [{"role": "user", "content": [PART] * 4_000}] * 5),
    "parts": ("messages", [{"role": "user", "content": [PART] * 4_000}] * 5),
    "parts before nonsense": ("messages", [*[{"role": "user", "content": [PART] * 4_000}] * 5, 5]),
    "calls": ("messages", [{"role": "assistant", "tool_calls": [CALL] * 6_000}] * 3),
    "many fields": ("messages", [{"role": "user", "content": "x", **{f"f{number}": 1 for number in range(7_000)}}]),
    "many fields of parts": ("input", [{"role": "user", "content": [PART | {f"f{number}": 1 for number in range(7_000)}]}]),
    "tools": ("tools", [{"type": "function", "function": {"name": "f", "description": "x" * MAX_TOOLS_NBYTES}}]),
}


@pytest.mark.parametrize(("param", "given"), TOO_MANY.values(), ids=TOO_MANY.keys())
@pytest.mark.parametrize("others", [{}, {"messages": []}], ids=["alone", "beside"])
def test_items_parts_calls_and_tools_are_counted_before_they_are_parsed(param: str, given: list[object], others: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"at most|more than") as refused:
        check_sizes(body(**{**others, param: given}), LIMITS, RouterConfig())
    assert refused.value.param == param


def test_members_of_objects_are_counted() -> None:
    many: dict[str, object] = {f"f{number}": 1 for number in range(7_000)}
    for param in ("chat_template_kwargs", "metadata"):
        with pytest.raises(InvalidRequestError, match="at most") as refused:
            check_sizes(body(**{param: many}), LIMITS, RouterConfig())
        assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="parameters"):
        check_sizes(body(**many), LIMITS, RouterConfig())


def test_what_is_counted_is_bounded_in_each_message_as_well() -> None:
    for param, given in (
        ("messages[0].content", [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": [CALL] * (MAX_PARTS + 1)}]),
    ):
        assert MAX_PARTS < MAX_MEMBERS
        with pytest.raises(InvalidRequestError, match="Invalid value") as refused:
            parse_chat(json.dumps({"model": "m", "messages": given}).encode())
        assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="at most"):
        parse_response(json.dumps({"model": "m", "input": [{"role": "user", "content": [PART] * (MAX_PARTS + 1)}]}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [5] * 1000},
        {"input": [{"type": "message", "role": "user", "content": [5] * 1000}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [5] * 1000}]},
        {"input": "x", "tools": [5] * 100},
        {"input": "x", "include": [5] * 100},
        {"messages": [MESSAGE], "stop": [5] * 100},
        {"messages": [MESSAGE], "stop_token_ids": ["x"] * 100},
        {"messages": [{"role": "user", "content": [5] * 1000}]},
        {"messages": [{"role": "assistant", "tool_calls": [5] * 1000}]},
    ],
    ids=range(9),
)
def test_of_a_list_only_the_first_wrong_part_is_looked_at(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as found:
        (ResponseRequest if "input" in fields else ChatCompletionRequest).model_validate_json(json.dumps({"model": "m", **fields}))
    assert found.value.error_count() <= 3


WRONG: list[object] = [{}] * 1000
CHAT = {"model": "m", "messages": [MESSAGE]}


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (ChatCompletionRequest, {**CHAT, "messages": WRONG}),
        (ChatCompletionRequest, {**CHAT, "messages": [{"role": "user", "content": WRONG}]}),
        (ChatCompletionRequest, {**CHAT, "tools": WRONG}),
        (ChatCompletionRequest, {**CHAT, "stop": WRONG}),
        (ChatCompletionRequest, {**CHAT, "stop_token_ids": WRONG}),
        (ChatCompletionRequest, {**CHAT, "guided_choice": WRONG}),
        (ChatCompletionRequest, {**CHAT, "structured_outputs": {"choice": WRONG}}),
        (CompletionRequest, {"model": "m", "prompt": WRONG}),
        (CompletionRequest, {"model": "m", "prompt": [WRONG]}),
        (CompletionRequest, {"model": "m", "prompt": [5] * 9 + [-5] * 1000}),
        (CompletionRequest, {"model": "m", "prompt": [5] * 9 + ["x"] * 1000}),
        (CompletionRequest, {"model": "m", "prompt": ["x"] * 9 + [5] * 1000}),
        (CompletionRequest, {"model": "m", "prompt": [[0.5]] * 1000}),
        (ResponseRequest, {"model": "m", "input": WRONG}),
        (ResponseRequest, {"model": "m", "input": "x", "tools": WRONG}),
        (ResponseRequest, {"model": "m", "input": "x", "include": WRONG}),
        (TokenizeRequest, {"model": "m", "messages": WRONG}),
        (DetokenizeRequest, {"model": "m", "tokens": WRONG}),
    ],
)
def test_lists_end_at_their_first_wrong_part(parse: type[BaseModel], fields: dict[str, object]) -> None:
    """An error per part would cost far more than the list did."""
    with pytest.raises(ValidationError) as refused:
        parse.model_validate_json(json.dumps(fields))
    assert refused.value.error_count() < 20
