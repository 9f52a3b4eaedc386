"""The load of a simulation as it can be handed to another process: a trace or a synthetic one, at any rate.

A rate is requests per second in the mean, whatever the load: a trace is sped up to it, conversations begin less often than they have turns,
bursts stand out of a lower rest.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from pd_serve.bench.trace import TRACE_BLOCK_TOKENS, Scaling
from pd_serve.plan.candidates import LoadShape
from pd_serve.plan.errors import PlanError
from pd_serve.plan.lengths import parse_lengths
from pd_serve.plan.workload import Requests, Shape, Turns, burst, conversations, from_trace, poisson

_LOOKED_AT = 20_000
"""Requests from which the shape of a load is told."""


class Burst(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`factor` times the rest's rate for the first `length_s` of every `every_s` seconds."""

    factor: float
    every_s: float
    length_s: float

    @classmethod
    def parse(cls, text: str) -> Burst:
        """`4:60:5`. Raises PlanError."""
        try:
            factor, every_s, length_s = (float(part) for part in text.split(":"))
        except ValueError:
            raise PlanError(f"{text!r} is no burst: expected FACTOR:EVERY:LENGTH in seconds, such as 4:60:5") from None
        if not (factor >= 1 and 0 < length_s < every_s):
            raise PlanError(f"burst {text}: expected a factor of at least 1 and 0 < length < every")
        return cls(factor, every_s, length_s)

    def rest_rate(self, mean: float) -> float:
        return mean * self.every_s / (self.every_s + (self.factor - 1) * self.length_s)


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace: str = ""
    """Path of a trace; empty: synthetic, of `input` and `output`."""
    limit: int = 0
    """Requests; 0: all of a trace."""
    minutes: float = 0.0
    """Of a trace; 0: all."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens per hash id of a trace."""
    max_input: int = 0
    max_output: int = 0
    input: str = "512"
    """Lengths, as lengths.py reads them; of conversations: of one question."""
    output: str = "128"
    burst: Burst | None = None
    turns: int = 1
    """Mean turns of a conversation; 1: independent requests that share nothing."""
    think_s: float = 20.0
    system_tokens: int = 512
    """Of conversations: the head that all share."""

    def check(self) -> None:
        """Raises PlanError."""
        if self.trace:
            if self.burst is not None or self.turns > 1:
                raise PlanError("bursts and turns are of synthetic loads: a trace has its own")
        elif self.burst is not None and self.turns > 1:
            raise PlanError("a load has bursts or turns, not both")
        elif not self.limit:
            raise PlanError("a synthetic load needs a number of requests")
        else:
            self._shape()

    def requests(self, rate: float, seed: int) -> Requests:
        """At `rate` requests per second in the mean. Raises PlanError."""
        return self.requests_at(rate / self.natural_rate() if self.trace else rate, seed)

    def requests_at(self, rate: float, seed: int) -> Requests:
        """Likewise; of a trace `rate` is how many times as fast. Raises PlanError."""
        if self.trace:
            return self._replayed(rate)
        if self.turns > 1:
            turns = Turns(self.turns, self.think_s, self.system_tokens)
            return islice(conversations(rate / self.turns, self._shape(), turns, seed=seed), self.limit)
        if self.burst is None:
            return poisson(rate, self._shape(), self.limit, seed)
        rest = self.burst.rest_rate(rate)
        rates = (rest, rest * self.burst.factor)
        return burst(rates, self.burst.every_s, self.burst.length_s, self._shape(), self.limit, seed)

    def natural_rate(self) -> float:
        """Of a trace as it was recorded. Raises PlanError."""
        times = [request.at_s for request in self._replayed(1.0)]
        if len(times) < 2 or times[-1] <= 0:
            raise PlanError(f"{self.trace}: too few requests to tell their rate")
        return (len(times) - 1) / times[-1]

    def num_requests(self) -> int:
        return self.limit or sum(1 for _ in self._replayed(1.0))

    def shape(self, rate: float, seed: int) -> LoadShape:
        """Means of its first requests, and what a cache that forgets nothing would leave to compute."""
        known: set[int] = set()
        num_requests = num_prompt = num_uncached = num_output = 0
        for request in islice(self.requests(rate, seed), _LOOKED_AT):
            num_known = next((place for place, key in enumerate(request.block_keys) if key not in known), len(request.block_keys))
            known.update(request.block_keys)
            num_requests += 1
            num_prompt += request.num_prompt
            num_uncached += request.num_prompt - min(num_known * request.block_tokens, request.num_prompt - 1)
            num_output += request.num_output
        if not num_requests:
            raise PlanError("the load has no requests")
        return LoadShape(num_prompt / num_requests, num_uncached / num_requests, num_output / num_requests)

    def words(self) -> str:
        """For people, without its rate."""
        if self.trace:
            part = f", first {self.minutes:g} minutes" if self.minutes else ""
            return f"{Path(self.trace).name}{part}, {self.num_requests()} requests"
        kind = f"conversations of {self.turns} turns" if self.turns > 1 else "requests"
        peaks = f", bursts of {self.burst.factor:g}x for {self.burst.length_s:g} s every {self.burst.every_s:g} s" if self.burst else ""
        return f"{self.limit} {kind}, {self.input} in, {self.output} out{peaks}"

    def _shape(self) -> Shape:
        return Shape(parse_lengths(self.input), parse_lengths(self.output))

    def _replayed(self, speed_up: float) -> Requests:
        scaling = Scaling(self.block_tokens, self.max_input, self.max_output)
        return from_trace(Path(self.trace), scaling, speed_up, self.limit, self.minutes)
