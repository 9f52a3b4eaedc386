"""Makes plans from parameters, and keeps them in files. Same parameters and seed, same plans, on every machine.

Arrivals, lengths and prompts are drawn from generators of their own, so that another rate or length leaves the rest as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np

from pd_serve.bench.errors import BenchError
from pd_serve.bench.records import RequestPlan

FIRST_TOKEN = 200
"""Below lie the control tokens of most vocabularies."""
DEFAULT_VOCAB = 32_000
"""Ids below this are in the vocabulary of nearly every model."""


class Arrivals(Enum):
    CONSTANT = "constant"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Uniform from `low` to `high`, both included; fixed where they are equal."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """`512` or `128-2048`. Raises BenchError."""
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise BenchError(f"{text!r} is no length in tokens: expected such as 512 or 128-2048")
        return cls(int(match[1]), int(match[2] or match[1]))


@dataclass(frozen=True, slots=True)
class Workload:
    """What to send. `pairs` (prompt tokens, output tokens) replaces the two ranges; it is gone through in order, again and again."""

    num_requests: int
    input_length: LengthRange
    output_length: LengthRange
    rate: float = 0.0
    """Requests per second; 0: no arrival times, for a closed loop."""
    arrivals: Arrivals = Arrivals.POISSON
    pairs: tuple[tuple[int, int], ...] = ()
    prefix_tokens: int = 0
    """Tokens at the head of each prompt that are shared with others; at most the prompt less one token."""
    num_prefixes: int = 1
    """Different shared heads, taken in turn."""
    vocab: int = DEFAULT_VOCAB
    seed: int = 0
    kind: str = "request"


def make_plans(workload: Workload) -> list[RequestPlan]:
    """Fresh prompts: nothing but the wished prefix is in any cache. Raises BenchError for parameters that make no sense."""
    if workload.vocab <= FIRST_TOKEN:
        raise BenchError(f"a vocabulary of {workload.vocab} is too small: prompts are drawn from {FIRST_TOKEN} upward")
    times = arrival_times(workload.num_requests, workload.rate, workload.arrivals, workload.seed)
    lengths = np.random.default_rng([workload.seed, 1])
    plans: list[RequestPlan] = []
    for index, at_s in enumerate(times):
        num_prompt, num_output = _lengths(workload, index, lengths)
        prefix: tuple[int, ...] = ()
        if workload.prefix_tokens:
            seed = (workload.seed, 2, index % workload.num_prefixes)
            prefix = random_tokens(min(workload.prefix_tokens, num_prompt - 1), workload.vocab, seed)
        prompt = prefix + random_tokens(num_prompt - len(prefix), workload.vocab, (workload.seed, 3, index))
        plans.append(RequestPlan(index, workload.kind, at_s, prompt, num_output))
    return plans


def arrival_times(count: int, rate: float, arrivals: Arrivals, seed: int) -> list[float]:
    """Seconds after the start, the first at 0. A Poisson process has exponential gaps of mean 1/rate."""
    if rate <= 0:
        return [0.0] * count
    if arrivals is Arrivals.CONSTANT:
        return [index / rate for index in range(count)]
    gaps = np.random.default_rng([seed, 0]).exponential(1 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def random_tokens(count: int, vocab: int, seed: Sequence[int]) -> tuple[int, ...]:
    """Ids between FIRST_TOKEN and `vocab`, the same for the same seed; a shorter run is the head of a longer one."""
    return tuple(np.random.default_rng(list(seed)).integers(FIRST_TOKEN, vocab, count).tolist())


def read_length_pairs(path: Path) -> tuple[tuple[int, int], ...]:
    """A line per request: prompt tokens and output tokens, parted by a comma or blanks; `#` begins a comment. Raises BenchError."""
    pairs: list[tuple[int, int]] = []
    for number, line in _lines(path):
        words = re.split(r"[,\s]+", line.partition("#")[0].strip())
        if words == [""]:
            continue
        try:
            num_prompt, num_output = (int(word) for word in words)
        except ValueError:
            raise BenchError(f"{path}:{number}: expected prompt tokens and output tokens, found {line.strip()!r}") from None
        if num_prompt < 1 or num_output < 1:
            raise BenchError(f"{path}:{number}: lengths are at least 1")
        pairs.append((num_prompt, num_output))
    if not pairs:
        raise BenchError(f"{path} holds no lengths")
    return tuple(pairs)


def write_plans(path: Path, plans: Iterable[RequestPlan]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for plan in plans:
            file.write(msgspec.json.encode(plan) + b"\n")


def read_plans(path: Path) -> list[RequestPlan]:
    """In the order of the file. Raises BenchError that names the line."""
    decoder = msgspec.json.Decoder(RequestPlan)
    plans: list[RequestPlan] = []
    for number, line in _lines(path):
        try:
            plans.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}:{number} is no request plan: {error}") from error
    if not plans:
        raise BenchError(f"{path} holds no request plans")
    return plans


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from enumerate(file, 1)
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _lengths(workload: Workload, index: int, generator: np.random.Generator) -> tuple[int, int]:
    if workload.pairs:
        return workload.pairs[index % len(workload.pairs)]
    ranges = (workload.input_length, workload.output_length)
    num_prompt, num_output = (int(generator.integers(one.low, one.high + 1)) for one in ranges)
    return num_prompt, num_output
