"""Replay of published request traces: their times and lengths, and prompts made so that equal hash ids are equal tokens.

Formats: Mooncake (a JSON object per line: timestamp in ms, input_length, output_length, hash_ids, one per block of 512 tokens; FAST'25
release) and Azure (CSV with TIMESTAMP, ContextTokens, GeneratedTokens; Azure public dataset 2023). For small models the blocks, and with
them the prompts, can be made smaller: with blocks of 32, a prompt of 6,758 tokens becomes one of 422 with the same blocks shared.
"""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import overload

import msgspec

from pd_serve.bench.errors import BenchError
from pd_serve.bench.records import RequestPlan
from pd_serve.bench.workload import DEFAULT_VOCAB, random_tokens

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id of the Mooncake format stands for."""
MOST_TOKENS = 1 << 24
"""Tokens of one prompt or answer."""
_LATEST_S = 1e11
"""Seconds since 1970, about the year 5000."""
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """Empty in formats that have none: such a prompt shares nothing."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a trace becomes requests. 0: no limit."""

    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens per hash id; prompts shrink by block_tokens / 512."""
    max_input: int = 0
    """Longer prompts are cut at their end, after they were shrunk."""
    max_output: int = 0
    vocab: int = DEFAULT_VOCAB
    seed: int = 0


def read_trace(path: Path, limit: int = 0, minutes: float = 0.0) -> list[TraceRequest]:
    """In order of time, the first at 0: the first `limit` requests, of the first `minutes` (0: all). Raises BenchError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            if head.lstrip().startswith("{"):
                requests = _mooncake(path, file, limit)
            elif head.strip().split(",") == list(_AZURE_COLUMNS):
                requests = _azure(path, csv.DictReader(file), limit)
            else:
                raise BenchError(f"{path} is no trace: expected JSON lines with hash_ids, or CSV with {', '.join(_AZURE_COLUMNS)}")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not requests:
        raise BenchError(f"{path} holds no requests")
    for place, request in enumerate(requests, start=1):
        lengths = (request.num_prompt_tokens, request.num_output_tokens)
        if not (-_LATEST_S < request.at_s < _LATEST_S and min(lengths) >= 0 and max(lengths) <= MOST_TOKENS):
            raise BenchError(f"{path}: request {place} in order of time has a time or a length that is impossible")
    first_s = requests[0].at_s
    return [
        TraceRequest(request.at_s - first_s, request.num_prompt_tokens, request.num_output_tokens, request.hash_ids)
        for request in requests
        if not minutes or request.at_s - first_s < 60 * minutes
    ]


class _LazyPlans(Sequence[RequestPlan]):
    """Plans that are each made when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> RequestPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestPlan]: ...
    def __getitem__(self, index: int | slice) -> RequestPlan | list[RequestPlan]:
        if isinstance(index, slice):
            return [self._plan(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._plan(index % len(self))

    @abstractmethod
    def _plan(self, index: int) -> RequestPlan:
        """`index` counts from the first and is within the length."""


class TracePlans(_LazyPlans):
    """The plans of a trace: prompts of a long one do not fit into memory together."""

    def __init__(self, requests: Sequence[TraceRequest], scaling: Scaling) -> None:
        self._requests = requests
        self._scaling = scaling

    def __len__(self) -> int:
        return len(self._requests)

    def _plan(self, index: int) -> RequestPlan:
        request, scaling = self._requests[index], self._scaling
        num_output = min(request.num_output_tokens, scaling.max_output or request.num_output_tokens)
        prompt = self._prompt(index, request)
        return RequestPlan(index, "trace", request.at_s, prompt, max(1, num_output), hash_ids=request.hash_ids)

    def ideal_hit_rate(self) -> float:
        """Share of prompt tokens that a cache which forgets nothing would have, if every prompt were computed before the next came.

        Whole blocks from the head of the prompt only, and never the last token, which has to be computed.
        """
        known: set[int] = set()
        num_hit = num_tokens = 0
        for request in self._requests:
            length = scaled_length(request, self._scaling)
            whole = request.hash_ids[: length // self._scaling.block_tokens]
            num_known = next((place for place, hash_id in enumerate(whole) if hash_id not in known), len(whole))
            num_hit += min(num_known * self._scaling.block_tokens, length - 1)
            num_tokens += length
            known.update(whole)
        return num_hit / num_tokens if num_tokens else 0.0

    def _prompt(self, index: int, request: TraceRequest) -> tuple[int, ...]:
        scaling = self._scaling
        length = scaled_length(request, scaling)
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            if len(tokens) >= length:
                break
            tokens += random_tokens(scaling.block_tokens, scaling.vocab, (scaling.seed, 4, hash_id))
        if len(tokens) < length:
            tokens += random_tokens(length - len(tokens), scaling.vocab, (scaling.seed, 5, index))
        return tuple(tokens[:length])


class SpedUp(_LazyPlans):
    """The same plans, `speed_up` times as fast."""

    def __init__(self, plans: Sequence[RequestPlan], speed_up: float) -> None:
        self._plans = plans
        self._speed_up = speed_up

    def __len__(self) -> int:
        return len(self._plans)

    def _plan(self, index: int) -> RequestPlan:
        plan = self._plans[index]
        return msgspec.structs.replace(plan, at_s=plan.at_s / self._speed_up)


def scaled_length(request: TraceRequest, scaling: Scaling) -> int:
    """Prompt tokens to send, at least 1."""
    length = request.num_prompt_tokens * scaling.block_tokens // TRACE_BLOCK_TOKENS if request.hash_ids else request.num_prompt_tokens
    return max(1, min(length, scaling.max_input or length))


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(path: Path, lines: Iterable[str], limit: int) -> list[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if limit and len(requests) >= limit:
            break
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BenchError(f"{path}:{number} is no request of a trace: {error}") from error
        requests.append(TraceRequest(found.timestamp / 1e3, found.input_length, found.output_length, found.hash_ids))
    return sorted(requests, key=lambda request: request.at_s)


def _azure(path: Path, rows: Iterable[dict[str, str]], limit: int) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    for number, row in enumerate(rows, 2):
        if limit and len(requests) >= limit:
            break
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"])
            num_prompt, num_output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (TypeError, ValueError) as error:
            raise BenchError(f"{path}:{number} is no request of a trace: {error}") from error
        seconds = (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()
        requests.append(TraceRequest(seconds, num_prompt, num_output))
    return sorted(requests, key=lambda request: request.at_s)
