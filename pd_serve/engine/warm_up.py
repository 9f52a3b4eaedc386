"""Computes once, before a worker says that it is ready, what the first requests would else be the first to compute.

oneDNN compiles a kernel for each weight's shape and count of rows when it first meets them, buffers grow to the largest step, memory is
touched for the first time. What is written lands in blocks that nobody owns yet. Called on the engine thread of every rank of a worker,
with the same arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pd_serve.clock import Clock
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, StepResult
from pd_serve.engine.linear import DECODE_ROWS, ROW_STEP
from pd_serve.ids import AttemptId
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.sampling import SamplingParams

_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_DRAWN = SamplingParams(max_tokens=1, top_p=0.9, num_logprobs=1)
_STEP_ID = 0
_TOKEN = 1


class _Runner(Protocol):
    def execute(self, batch: Batch, on_layer: None = None) -> StepResult: ...


class _Group(Protocol):
    def minimum(self, value: int) -> int: ...


@dataclass(frozen=True, slots=True)
class WarmUpPlan:
    layout: KVLayout
    max_len: int
    """Longest sequence, tokens."""
    max_batch_tokens: int
    max_running: int
    budget_s: float
    """Seconds after which no further step is begun."""


def warm_up(runner: _Runner, plan: WarmUpPlan, group: _Group, clock: Clock) -> int:
    """Steps of every count of rows that requests come with, the commonest first, until there are no more or the time is up; how many."""
    deadline = clock.now() + plan.budget_s
    num_steps = 0
    for batch in _batches(plan):
        # Ranks that add up their parts must compute the same steps: the slowest decides for all.
        if not group.minimum(int(clock.now() < deadline)):
            break
        runner.execute(batch)
        num_steps += 1
    return num_steps


def _batches(plan: WarmUpPlan) -> Iterator[Batch]:
    size, num_blocks = plan.layout.block_size, plan.layout.num_blocks
    longest = min(plan.max_batch_tokens, plan.max_len - 1, num_blocks * size - 1)
    most = min(plan.max_running, plan.max_batch_tokens, num_blocks)
    yield from (_decode(count) for count in (1, 2, 4, 8) if count <= most)
    yield from (_prefill(count, size) for count in _halves(longest))
    yield from (_decode(count) for count in range(3, min(most, DECODE_ROWS) + 1) if count not in (4, 8))
    yield from (_prefill(count, size) for count in range(DECODE_ROWS + ROW_STEP, longest, ROW_STEP) if count not in _halves(longest))


def _halves(count: int) -> tuple[int, ...]:
    """The count, its half, and so on as long as there is something to compile for."""
    return (count, *_halves(count // 2)) if count > DECODE_ROWS else ()


def _decode(num_sequences: int) -> Batch:
    entries = tuple(
        BatchEntry(AttemptId(index), Phase.DECODE, (_TOKEN,), 0, (index,), SampleSpec(_DRAWN if index else _GREEDY, 1, 1))
        for index in range(num_sequences)
    )
    return Batch(_STEP_ID, entries)


def _prefill(num_tokens: int, block_size: int) -> Batch:
    blocks = tuple(range(-(-num_tokens // block_size)))
    entry = BatchEntry(AttemptId(0), Phase.PREFILL, (_TOKEN,) * num_tokens, 0, blocks, SampleSpec(_GREEDY, num_tokens, 0))
    return Batch(_STEP_ID, (entry,))
