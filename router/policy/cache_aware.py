"""The worker that has most of the prompt in its prefix cache, as long as the load is balanced; otherwise the least loaded one.

Source: SGLang's router (cache_aware: --cache-threshold, --balance-abs-threshold, --balance-rel-threshold): workers are out of balance when
the most loaded exceeds the least loaded by more than an absolute and by more than a relative threshold. There load is counted in requests,
here in tokens; there the router guesses what is cached, here the workers tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.policy.base import Demand, Leg, Scorer, WorkerView
from router.policy.columns import Look, Rows, ScoreColumns


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """Load is out of balance when both are exceeded."""

    min_difference_tokens: int
    max_ratio: float


class CacheAware:
    """Ties of what is cached, which is all without a hit, go to the least loaded."""

    looks_at_pairs = False
    reads_cached = True
    is_columnar = True

    def __init__(self, leg: Leg, settings: BalanceSettings) -> None:
        self._leg = leg
        self._settings = settings

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        leg, cached = self._leg, demand.cached
        loads = [worker.load(leg) for worker in workers]
        if not cached or not self._is_balanced(max(loads), min(loads)):
            return lambda worker, partner: (0, worker.load(leg))
        return lambda worker, partner: (-cached.get(worker.peer, 0), worker.load(leg))

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        load = look.table.load(self._leg)[rows]
        if not self._is_balanced(int(load.max()), int(load.min())):
            return (load,)
        return -look.cached[rows], load

    def chosen(self, worker: WorkerView) -> None:
        return None

    def _is_balanced(self, most: int, least: int) -> bool:
        return most - least <= self._settings.min_difference_tokens or most <= self._settings.max_ratio * least
