"""Fleets that could be bought for one number of GPUs: how many workers of which role, of which TP degree, with which chunk budget.

A worker model stands for one TP degree: `num_gpus` says which. What each fleet could carry at the very best follows from the ratio formula
(ratio.py) with the throughputs of full batches; the search starts there and passes over what could not win even so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from pd_serve.plan.ratio import Demand, Supply, need
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import Role

CHUNK_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of one step of a colocated worker. Source: the range of Sarathi-Serve (OSDI 2024)."""
_UNLIMITED = 1e12
_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D", Role.BOTH: "C"}


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    role: Role
    count: int
    model: WorkerModel

    @property
    def num_gpus(self) -> int:
        return self.count * self.model.num_gpus


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fleet."""

    pools: tuple[Pool, ...]
    chunk_budget: int = 0
    """Tokens of a step of colocated workers; 0: what their model says."""

    @property
    def name(self) -> str:
        """`3P5D`, `3P5D tp 2/4`, `8C 512`."""
        counts = "".join(f"{pool.count}{_LETTERS[pool.role]}" for pool in self.pools)
        gpus = [pool.model.num_gpus for pool in self.pools]
        degrees = f" tp {'/'.join(map(str, gpus))}" if max(gpus) > 1 else ""
        return counts + degrees + (f" {self.chunk_budget}" if self.chunk_budget else "")

    @property
    def num_gpus(self) -> int:
        return sum(pool.num_gpus for pool in self.pools)

    @property
    def is_disaggregated(self) -> bool:
        return any(pool.role is Role.PREFILL for pool in self.pools)

    def count(self, role: Role) -> int:
        return sum(pool.count for pool in self.pools if pool.role is role)

    def degrees(self) -> tuple[int, ...]:
        """GPUs of one worker of each pool."""
        return tuple(pool.model.num_gpus for pool in self.pools)


@dataclass(frozen=True, slots=True)
class LoadShape:
    """What one request asks for, on average."""

    num_prompt: float
    num_uncached: float
    """Of them, what no cache could hold: an earlier prompt did not have it."""
    num_output: float

    @property
    def context(self) -> float:
        """Tokens in cache halfway through its output."""
        return self.num_prompt + self.num_output / 2


def disaggregated(prefill: int, decode: int, prefill_model: WorkerModel, decode_model: WorkerModel) -> Candidate:
    return Candidate((Pool(Role.PREFILL, prefill, prefill_model), Pool(Role.DECODE, decode, decode_model)))


def colocated(count: int, model: WorkerModel, chunk_budget: int = 0) -> Candidate:
    return Candidate((Pool(Role.BOTH, count, model),), chunk_budget)


def splits(
    num_gpus: int, prefill_models: Sequence[WorkerModel], decode_models: Sequence[WorkerModel], whole_grid: bool = False
) -> tuple[Candidate, ...]:
    """Every xPyD that leaves no room for one more prefill worker; with `whole_grid` every one that fits at all."""
    found: list[Candidate] = []
    for prefill_model in prefill_models:
        for decode_model in decode_models:
            for decode in range(1, num_gpus // decode_model.num_gpus + 1):
                most = (num_gpus - decode * decode_model.num_gpus) // prefill_model.num_gpus
                for prefill in range(1 if whole_grid else max(1, most), most + 1):
                    found.append(disaggregated(prefill, decode, prefill_model, decode_model))
    return tuple(found)


def families(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, ...]]:
    """Splits of the same TP degrees, by the number of prefill workers: along one, goodput rises to its best and falls."""
    by_degrees: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in candidates:
        by_degrees.setdefault(candidate.degrees(), []).append(candidate)
    for family in by_degrees.values():
        yield tuple(sorted(family, key=lambda candidate: candidate.count(Role.PREFILL)))


def most_requests_per_s(candidate: Candidate, load: LoadShape, itl_s: float = 0.0) -> float:
    """What the fleet could carry if every batch were full and nothing ever waited for anything: a bound no schedule exceeds for long.

    `itl_s`: batches are no larger than a step within it allows; 0: as large as the worker holds.
    """
    return min(_most_of_pool(pool, load, itl_s) for pool in candidate.pools)


def best_supply(prefill_model: WorkerModel, decode_model: WorkerModel, load: LoadShape, itl_s: float = 0.0) -> Supply:
    """T_P and T_D of the ratio formula at full batches; without prefill's attention, which depends on the prompt."""
    per_token = prefill_model.prefill[1]
    return Supply(
        prefill_tokens_per_s=1 / per_token if per_token else _UNLIMITED,
        decode_tokens_per_s=1 / seconds_per_token(decode_model, load.context, itl_s),
        gpus_per_prefill=prefill_model.num_gpus,
        gpus_per_decode=decode_model.num_gpus,
    )


def seconds_per_token(model: WorkerModel, context: float, itl_s: float = 0.0) -> float:
    """Of a decode worker with the largest batch it can hold, of sequences of `context` tokens each."""
    fixed, per_context, per_sequence = model.decode
    each = per_context * context + per_sequence
    batch = max(1.0, min(float(model.max_running), model.num_kv_tokens / max(1.0, context)))
    if itl_s and each > 0:
        batch = max(1.0, min(batch, (itl_s - fixed) / each))
    return fixed / batch + each


def _most_of_pool(pool: Pool, load: LoadShape, itl_s: float) -> float:
    """`exact_...` of the formula at 1 request/s is the share of one worker that each request per second keeps busy."""
    supply = best_supply(pool.model, pool.model, load, itl_s)
    busy = need(1.0, Demand(load.num_uncached, load.num_output), supply)
    prompts, outputs = pool.role is not Role.DECODE, pool.role is not Role.PREFILL
    return pool.count / (prompts * busy.exact_prefill + outputs * busy.exact_decode)
