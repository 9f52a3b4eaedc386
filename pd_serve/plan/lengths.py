"""How long prompts and answers of a synthetic load are: distributions to draw from, many at once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pd_serve.bench.trace import MOST_TOKENS
from pd_serve.plan.errors import PlanError

Counts = npt.NDArray[np.int64]
_MOST_SIGMA = 5.0


class Lengths(Protocol):
    def draw(self, generator: np.random.Generator, count: int) -> Counts:
        """Tokens of `count` requests, each at least 1."""
        ...

    @property
    def mean(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def draw(self, generator: np.random.Generator, count: int) -> Counts:
        return np.full(count, self.num_tokens, np.int64)

    @property
    def mean(self) -> float:
        return float(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends included."""

    low: int
    high: int

    def draw(self, generator: np.random.Generator, count: int) -> Counts:
        return generator.integers(self.low, self.high + 1, count)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal of mean ln(median) and this sigma, rounded; cut at `low` and, where it is not 0, `high`. Chats and code look so:
    sigma near 1 (the Azure traces of 2023 have 0.9 to 1.4)."""

    median: float
    sigma: float
    low: int = 1
    high: int = 0

    def draw(self, generator: np.random.Generator, count: int) -> Counts:
        drawn = np.rint(generator.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high or MOST_TOKENS).astype(np.int64)

    @property
    def mean(self) -> float:
        """Without the cuts."""
        return self.median * math.exp(self.sigma**2 / 2)


def parse_lengths(text: str) -> Lengths:
    """`512`, `128-2048` (uniform), `lognormal:512:0.9` or `lognormal:512:0.9:8192` (median, sigma, most). Raises PlanError."""
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip()):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high <= MOST_TOKENS:
            return Fixed(low) if low == high else Uniform(low, high)
    if match := re.fullmatch(r"lognormal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)(?::(\d+))?", text.strip()):
        median, sigma, most = float(match[1]), float(match[2]), int(match[3] or 0)
        if 1 <= median <= MOST_TOKENS and sigma <= _MOST_SIGMA and most <= MOST_TOKENS:
            return LogNormal(median, sigma, high=most)
    raise PlanError(f"{text!r} is no length in tokens: expected such as 512, 128-2048 or lognormal:512:0.9, up to {MOST_TOKENS}")
