"""Large bodies: what could never be taken is refused before it is parsed, what could is left to the parser."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

import pytest

from pd_serve.config import RouterConfig
from pd_serve.errors import ContextLengthError, InvalidRequestError, RequestError
from pd_serve.protocol.openai import parse_chat, parse_completion
from router.admission import Limits
from router.api.glance import LONG_BODY, check_sizes

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


@pytest.mark.parametrize(
    "prompt", [[5] * 9 + [-5] * 1_000_000, [5] * 9 + ["x"] * 1_000_000, ["x"] * 9 + [5] * 1_000_000, [[0.5]] * 300_000]
)
def test_of_many_wrong_parts_the_first_is_told(prompt: list[object]) -> None:
    data = body(prompt=prompt)
    with pytest.raises(InvalidRequestError, match="prompt"):
        parse_completion(data)
    assert takes_less_than(2.0, lambda: parse_completion(data))
