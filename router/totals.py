"""What all workers together can do and have to do: for predictions of what comes next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd_serve.protocol.link import Role
from router.policy.base import Demand, WorkerView
from router.policy.columns import Look, WorkerTable


@dataclass(frozen=True, slots=True)
class Totals:
    """Prompts are computed by the prefill workers or, where there are none, by those that decode."""

    prefill_tokens_per_s: float
    """Of all that compute prompts; 0: there are none."""
    one_tokens_per_s: float
    """Of the fastest of them."""
    num_tokens_computing: int
    """Prompt tokens that were sent to them and are not computed."""
    num_tokens_sent: int
    """The same, of all workers."""
    num_decode: int
    """Workers that decode."""
    num_sequences: int
    """That they hold or were sent."""


def totals_of(workers: Sequence[WorkerView]) -> Totals:
    if type(workers) is WorkerTable:
        return _of_columns(workers)
    decodes = [worker for worker in workers if worker.role is not Role.PREFILL]
    computing = [worker for worker in workers if worker.role is Role.PREFILL] or decodes
    rates = [worker.prefill_tokens_per_s for worker in computing]
    return Totals(
        prefill_tokens_per_s=sum(rates),
        one_tokens_per_s=max(rates, default=0.0),
        num_tokens_computing=sum([worker.prefill_backlog_tokens for worker in computing]),
        num_tokens_sent=sum([worker.prefill_backlog_tokens for worker in workers]),
        num_decode=len(decodes),
        num_sequences=sum([worker.num_sequences for worker in decodes]),
    )


def least_uncached(workers: Sequence[WorkerView], demand: Demand) -> int:
    """As Demand.num_uncached, of the one of those that compute prompts that has most of it cached."""
    if type(workers) is WorkerTable:
        computing = workers.is_prefill if workers.is_prefill.any() else workers.can_decode
        num_uncached = Look(workers, demand).num_uncached[computing]
        return int(num_uncached.min()) if num_uncached.size else demand.num_tokens
    those = [worker for worker in workers if worker.role is Role.PREFILL] or workers
    return min((demand.num_uncached(worker.peer) for worker in those), default=demand.num_tokens)


def num_free_slots(workers: Sequence[WorkerView], max_sequences: int, tokens_of_one: float) -> float:
    """Sequences of so many tokens each that the decode side could take, by count and by memory."""
    if type(workers) is WorkerTable:
        decode, table = workers.can_decode, workers
        by_memory = table.columns.num_free_tokens[decode] / tokens_of_one
        return float(np.maximum(0.0, np.minimum(max_sequences - table.num_sequences[decode], by_memory)).sum())
    slots = [
        min(float(max_sequences - worker.num_sequences), worker.num_free_tokens / tokens_of_one)
        for worker in workers
        if worker.role is not Role.PREFILL
    ]
    return sum([max(0.0, slot) for slot in slots])


def _of_columns(table: WorkerTable) -> Totals:
    computing = table.is_prefill if table.is_prefill.any() else table.can_decode
    rates = table.columns.speed[computing]
    return Totals(
        prefill_tokens_per_s=float(rates.sum()),
        one_tokens_per_s=float(rates.max()) if rates.size else 0.0,
        num_tokens_computing=int(table.backlog[computing].sum()),
        num_tokens_sent=int(table.backlog[table.is_prefill | table.can_decode].sum()),
        num_decode=int(table.can_decode.sum()),
        num_sequences=int(table.num_sequences[table.can_decode].sum()),
    )
