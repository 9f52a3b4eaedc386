"""The requests of a simulation, as streams: synthetic loads, and published traces with their real shared prefixes.

Every stream is in the order of time, the same for the same arguments on every machine, and makes its requests as they are asked for: a
million of them take no more memory than a thousand.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pd_serve.bench.errors import BenchError
from pd_serve.bench.trace import Scaling, TraceRequest, read_trace, scaled_length
from pd_serve.plan.errors import PlanError
from pd_serve.plan.lengths import Lengths

UNSCALED = Scaling()
_AT_ONCE = 4096
"""Draws of a generator that are made together: numpy's calls are dear, its numbers are not."""
_KEY_MASK = (1 << 64) - 1


class PlannedRequest(NamedTuple):
    at_s: float
    """After the start."""
    num_prompt: int
    num_output: int
    block_keys: tuple[int, ...] = ()
    """64 bits for each block of `block_tokens` that the prompt begins, chained: equal keys mean equal tokens from the head of the prompt up
    to the end of that block, or of the shorter prompt. Empty: nothing is shared with any other."""
    block_tokens: int = 512
    session: str = ""
    key: str = ""
    """Of the tenant."""
    priority: int = 0


Requests = Iterator[PlannedRequest]


@dataclass(frozen=True, slots=True)
class Shape:
    """How long prompts and answers are."""

    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class Turns:
    """Of conversations: each turn's prompt is all that was said before and a new question."""

    num_turns: int = 4
    """In the mean; how many a conversation has is geometric."""
    think_s: float = 20.0
    """Mean time between a question and the next one, the answer's time among it."""
    system_tokens: int = 512
    """Shared by all conversations of one system prompt."""
    num_systems: int = 1
    max_prompt: int = 0
    """A conversation ends before its prompt is longer; 0: no limit."""


USUAL_TURNS = Turns()


def poisson(rate: float, shape: Shape, limit: int = 0, seed: int = 0) -> Requests:
    """Independent requests, `rate` a second, nothing shared; endless without a limit. Raises PlanError."""
    _check_rate(rate)
    moments = _sums(gap / rate for gap in _exponential(seed))
    return islice(_sized(moments, shape, seed), limit or None)


def burst(rates: tuple[float, float], every_s: float, peak_s: float, shape: Shape, limit: int = 0, seed: int = 0) -> Requests:
    """Poisson at the second of the rates for the first `peak_s` of every `every_s` seconds, else at the first. Raises PlanError."""
    for rate in rates:
        _check_rate(rate)
    if not 0 < peak_s < every_s:
        raise PlanError(f"bursts of {peak_s:g} s every {every_s:g} s: expected 0 < length < distance")
    return islice(_sized(_bursts(rates, every_s, peak_s, seed), shape, seed), limit or None)


def conversations(rate: float, shape: Shape, turns: Turns = USUAL_TURNS, limit: int = 0, seed: int = 0, block_tokens: int = 32) -> Requests:
    """`rate` new conversations a second; `shape` is that of one question and its answer. Sessions are named; a turn comes at its time
    whatever became of the one before. Raises PlanError."""
    _check_rate(rate)
    if turns.num_turns < 1 or turns.think_s < 0 or turns.num_systems < 1 or block_tokens < 1:
        raise PlanError("conversations have at least one turn, one system prompt, blocks of one token and no negative pauses")
    return islice(_conversations(rate, shape, turns, seed, block_tokens), limit or None)


def from_trace(path: Path, scaling: Scaling = UNSCALED, speed_up: float = 1.0, limit: int = 0, minutes: float = 0.0) -> Requests:
    """A published trace (bench/trace.py reads its formats), its prefixes shared as they were. `speed_up`: times as fast. A limit beyond its
    end begins it again with prompts of their own, as if the next day had the same arrivals. Raises PlanError."""
    if speed_up <= 0:
        raise PlanError(f"a trace is replayed at a speed above 0, not {speed_up:g}")
    try:
        requests = read_trace(path, limit, minutes)
    except BenchError as error:
        raise PlanError(str(error)) from error
    return _replay(requests, scaling, speed_up, limit or len(requests))


def overlaid(*streams: Requests) -> Requests:
    """Several streams as one, in the order of time."""
    return heapq.merge(*streams, key=lambda request: request.at_s)


def tagged(requests: Requests, key: str = "", priority: int = 0) -> Requests:
    """The same requests as those of one tenant and class."""
    return (request._replace(key=key, priority=priority) for request in requests)


class _Conversation:
    def __init__(self, name: str, number: int, system: tuple[int, int], system_tokens: int, block_tokens: int) -> None:
        self._name = name
        self._number = number
        self._system = system
        self._system_tokens = system_tokens
        self._block_tokens = block_tokens
        self._keys: list[int] = []
        self.num_tokens = system_tokens
        """Said so far, the system prompt included."""

    def ask(self, at_s: float, num_question: int, num_output: int) -> PlannedRequest:
        num_prompt = self.num_tokens + num_question
        size = self._block_tokens
        for place in range(len(self._keys), -(-num_prompt // size)):
            is_shared = (place + 1) * size <= self._system_tokens
            content = (*self._system, -1) if is_shared else (self._system[0], self._number, place)
            self._keys.append(chained(self._keys[-1] if self._keys else 0, hash(content)))
        self.num_tokens = num_prompt + num_output
        return PlannedRequest(at_s, num_prompt, num_output, tuple(self._keys), size, self._name)


def chained(parent: int, content: int) -> int:
    """The key of a block behind one of key `parent`. The hash of a tuple of integers is the same in every process."""
    return hash((parent, content)) & _KEY_MASK


def _conversations(rate: float, shape: Shape, turns: Turns, seed: int, block_tokens: int) -> Requests:
    arrivals, pauses = _exponential(seed), _exponential(seed + 1)
    lengths = _lengths(shape, seed)
    ends = np.random.default_rng([seed, 3])
    open_: list[tuple[float, int, _Conversation]] = []
    begin_s = 0.0
    for number in count():
        talk = _Conversation(f"s{number}", number, (seed, number % turns.num_systems), turns.system_tokens, block_tokens)
        heapq.heappush(open_, (begin_s, number, talk))
        begin_s += next(arrivals) / rate
        while open_ and open_[0][0] <= begin_s:
            at_s, who, talk = heapq.heappop(open_)
            num_question, num_output = next(lengths)
            if turns.max_prompt and talk.num_tokens + num_question > turns.max_prompt:
                continue
            yield talk.ask(at_s, num_question, num_output)
            if ends.random() >= 1 / turns.num_turns:
                heapq.heappush(open_, (at_s + next(pauses) * turns.think_s, who, talk))


def _replay(requests: list[TraceRequest], scaling: Scaling, speed_up: float, limit: int) -> Requests:
    mean_gap_s = requests[-1].at_s / max(1, len(requests) - 1)
    lap_s = requests[-1].at_s + mean_gap_s
    for index in range(limit):
        lap, place = divmod(index, len(requests))
        request = requests[place]
        num_prompt = scaled_length(request, scaling)
        keys: list[int] = []
        parent = hash((scaling.seed, lap))
        for hash_id in request.hash_ids[: -(-num_prompt // scaling.block_tokens)]:
            parent = chained(parent, hash_id)
            keys.append(parent)
        num_output = max(1, min(request.num_output_tokens, scaling.max_output or request.num_output_tokens))
        yield PlannedRequest((request.at_s + lap * lap_s) / speed_up, num_prompt, num_output, tuple(keys), scaling.block_tokens)


def _sized(moments: Iterator[float], shape: Shape, seed: int) -> Requests:
    return (PlannedRequest(at_s, *lengths) for at_s, lengths in zip(moments, _lengths(shape, seed), strict=False))


def _sums(gaps: Iterable[float]) -> Iterator[float]:
    """The first request comes at 0."""
    at_s = 0.0
    for gap in gaps:
        yield at_s
        at_s += gap


def _bursts(rates: tuple[float, float], every_s: float, peak_s: float, seed: int) -> Iterator[float]:
    """Unit exponentials, each spent at the rate of its moment: a Poisson process whose rate changes."""
    rate, peak = rates
    at_s = 0.0
    for gap in _exponential(seed):
        yield at_s
        while True:
            period, phase_s = divmod(at_s, every_s)
            now, end_s = (peak, period * every_s + peak_s) if phase_s < peak_s else (rate, (period + 1) * every_s)
            if at_s + gap / now <= end_s:
                at_s += gap / now
                break
            gap -= (end_s - at_s) * now
            at_s = end_s


def _exponential(seed: int) -> Iterator[float]:
    """Of mean 1."""
    generator = np.random.default_rng([seed, 0])
    while True:
        yield from generator.exponential(1.0, _AT_ONCE).tolist()


def _lengths(shape: Shape, seed: int) -> Iterator[tuple[int, int]]:
    prompts, outputs = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
    while True:
        drawn = shape.prompt.draw(prompts, _AT_ONCE), shape.output.draw(outputs, _AT_ONCE)
        yield from zip(drawn[0].tolist(), drawn[1].tolist(), strict=True)


def _check_rate(rate: float) -> None:
    if not 0 < rate < float("inf"):
        raise PlanError(f"a rate is above 0 requests per second, not {rate:g}")
