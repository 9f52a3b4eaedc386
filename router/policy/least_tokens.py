"""The worker with the fewest tokens ahead of the request: prompt tokens not yet computed on prefill, context tokens on decode."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Demand, Leg, Score, Scorer, WorkerView
from router.policy.columns import Look, Rows, ScoreColumns


class LeastTokens:
    """The order of workers breaks ties."""

    looks_at_pairs = False
    reads_cached = False
    is_columnar = True

    def __init__(self, leg: Leg) -> None:
        self._leg = leg

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        return self._score

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        return (look.table.load(self._leg)[rows],)

    def chosen(self, worker: WorkerView) -> None:
        return None

    def _score(self, worker: WorkerView, partner: WorkerView | None) -> Score:
        return (worker.load(self._leg),)
