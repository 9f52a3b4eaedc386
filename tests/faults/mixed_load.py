"""Requests of every kind that a move could spoil, their undisturbed answers, and clients that ask them over and over and compare.

Greedy and seeded sampling, whole and streamed, with and without log-probabilities, stop strings that straddle tokens, prompts that share
prefixes. An answer is everything a client can see of the result: text, tokens' log-probabilities, finish reason, usage.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 120.0
Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What must not depend on where, and in how many places, a request was served."""

    text: str
    logprobs: str
    """JSON, so that floats compare exactly; empty where none were asked for."""
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(frozen=True)
class Heard:
    """An answer and when its pieces came, in seconds of time.monotonic()."""

    answer: Answer
    started_at: float
    arrivals: tuple[float, ...]

    def longest_pause_s(self, since: float) -> float:
        """The longest wait between two pieces (or for the first) of those that ended after `since`."""
        times = (self.started_at, *self.arrivals)
        return max((after - before for before, after in pairwise(times) if after > since), default=0.0)


class UnequalError(AssertionError):
    """An answer differs from the undisturbed one."""


class RefusedError(AssertionError):
    """A request that could be served was not."""


class BrokenOffError(RefusedError):
    """The connection broke, or was not to be had: no answer, and no word from the router why."""


@dataclass(frozen=True)
class Question:
    body: Body
    expected: Answer


async def ask(client: httpx.AsyncClient, body: Body) -> Heard:
    """Raises RefusedError for anything but a full answer, BrokenOffError where the connection is at fault."""
    began = time.monotonic()
    try:
        return await (_ask_streamed if body.get("stream") else _ask_whole)(client, body, began)
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        raise BrokenOffError(f"{error!r} for {body}") from error
    except (httpx.HTTPError, ValueError) as error:
        raise RefusedError(f"{error!r} for {body}") from error


async def _ask_whole(client: httpx.AsyncClient, body: Body, began: float) -> Heard:
    reply = await client.post("/v1/completions", json=body)
    if reply.status_code != 200:
        raise RefusedError(f"{reply.status_code} {reply.text} for {body}")
    answer = reply.json()
    choice = answer["choices"][0]
    return Heard(_answer(choice["text"], choice.get("logprobs"), choice["finish_reason"], answer["usage"]), began, (time.monotonic(),))


async def _ask_streamed(client: httpx.AsyncClient, body: Body, began: float) -> Heard:
    text, logprobs, arrivals = "", _Merged(), []
    finish, usage, is_done = None, None, False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RefusedError(f"{reply.status_code} {(await reply.aread()).decode()} for {body}")
        async for line in reply.aiter_lines():
            if not line:
                continue
            if is_done or not line.startswith("data: "):
                raise RefusedError(f"{line!r} in a stream for {body}")
            arrivals.append(time.monotonic())
            if line == "data: [DONE]":
                is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RefusedError(f"{event} for {body}")
            for choice in event["choices"]:
                if finish is not None:
                    raise UnequalError(f"more after the finish: {event} for {body}")
                text += choice["text"]
                logprobs.add(choice.get("logprobs"))
                finish = choice["finish_reason"]
            if event.get("usage"):
                if usage is not None:
                    raise UnequalError(f"usage told twice for {body}")
                usage = event["usage"]
    if not is_done or finish is None or usage is None:
        raise RefusedError(f"the stream broke off after {text!r} for {body}")
    return Heard(_answer(text, logprobs.value, finish, usage), began, tuple(arrivals))


class _Merged:
    """Log-probabilities of a stream's pieces as one answer would have them."""

    def __init__(self) -> None:
        self.value: dict[str, list[Any]] | None = None

    def add(self, piece: dict[str, list[Any]] | None) -> None:
        if piece is None:
            return
        self.value = self.value or {}
        for name, items in piece.items():
            if items is not None:
                self.value.setdefault(name, []).extend(items)


def _answer(text: str, logprobs: dict[str, Any] | None, finish: str, usage: dict[str, Any]) -> Answer:
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    if usage["total_tokens"] != prompt + completion or not 0 <= details.get("cached_tokens", 0) <= prompt:
        raise UnequalError(f"usage does not add up: {usage}")
    named = {name: items for name, items in (logprobs or {}).items() if items is not None}
    return Answer(text, json.dumps(named, sort_keys=True) if logprobs is not None else "", finish, prompt, completion)


# ---- the mix


def draw_bodies(seed: int, count: int, max_tokens: tuple[int, int] = (16, 40)) -> list[Body]:
    """`count` requests. Every fourth prompt of one family shares a prefix of some blocks; lengths straddle block boundaries."""
    rng = Random(seed)
    families = [[rng.randrange(300, 20_000) for _ in range(rng.choice((32, 47, 64)))] for _ in range(max(1, count // 4))]
    bodies: list[Body] = []
    for index in range(count):
        own = [rng.randrange(300, 20_000) for _ in range(rng.choice((1, 15, 16, 17, 40)))]
        body: Body = {
            "model": "demo",
            "prompt": families[index % len(families)] + own,
            "max_tokens": rng.randint(*max_tokens),
            "ignore_eos": True,
            "temperature": 0.0,
        }
        if index % 2:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": rng.randrange(2**31)}
        if index % 4 in (1, 2):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if index % 3 == 0:
            body["logprobs"] = rng.choice((0, 2))
        if index % 7 == 5:
            body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
        bodies.append(body)
    return bodies


async def with_straddling_stop(client: httpx.AsyncClient, body: Body) -> Body:
    """The same request with a stop string that begins in one of its late tokens and ends in the next; unchanged where there is none."""
    told = await ask(client, body | {"logprobs": 0, "stream": False} if "stream_options" not in body else _whole(body))
    logprobs = json.loads(told.answer.logprobs)
    tokens: list[str] = logprobs["tokens"]
    offsets: list[int] = logprobs["text_offset"]
    for index in range(len(tokens) * 2 // 3, len(tokens) - 1):
        stop = tokens[index][-2:] + tokens[index + 1][:2]
        if len(stop) >= 3 and "\ufffd" not in stop and told.answer.text.find(stop) == offsets[index + 1] - len(tokens[index][-2:]):
            return body | {"stop": [stop]}
    return body


def _whole(body: Body) -> Body:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")} | {"logprobs": 0}


async def prepare(
    client: httpx.AsyncClient, seed: int, count: int, max_tokens: tuple[int, int] = (16, 40), num_at_once: int = 6
) -> list[Question]:
    """Ask every request once, undisturbed, a few at a time."""
    slots = asyncio.Semaphore(num_at_once)

    async def one(index: int, body: Body) -> Question:
        async with slots:
            if index % 5 == 4:
                body = await with_straddling_stop(client, body)
            return Question(body, (await ask(client, body)).answer)

    return list(await asyncio.gather(*(one(index, body) for index, body in enumerate(draw_bodies(seed, count, max_tokens)))))


def check(question: Question, heard: Heard) -> None:
    if heard.answer != question.expected:
        raise UnequalError(f"not the undisturbed answer:\n  {heard.answer}\n  {question.expected}\n  for {question.body}")


@dataclass
class Clients:
    """Asks questions at random, `num_clients` at a time, until stopped; the first wrong answer stops them all and is raised by stop()."""

    client: httpx.AsyncClient
    questions: list[Question]
    rng: Random
    num_clients: int = 6
    on_heard: Callable[[Heard], None] = lambda heard: None
    num_answers: int = 0
    failures: list[AssertionError] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _is_stopping: bool = False

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_asking(Random(self.rng.random()))) for _ in range(self.num_clients)]

    async def stop(self) -> None:
        """Let running requests end."""
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def _keep_asking(self, rng: Random) -> None:
        while not self._is_stopping:
            question = rng.choice(self.questions)
            try:
                heard = await ask(self.client, question.body)
                check(question, heard)
            except AssertionError as error:
                self.failures.append(error)
                continue
            self.num_answers += 1
            self.on_heard(heard)
