"""Two workers drawn at random, the less loaded of them: routers that know nothing of each other do not all run to the same one.

Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from router.policy.base import Demand, Leg, Score, Scorer, WorkerView
from router.policy.columns import Look, Rows, ScoreColumns


class PowerOfTwo:
    """The others come after these two, by load, for where neither can be joined with the other leg's."""

    looks_at_pairs = False
    reads_cached = False
    is_columnar = True

    def __init__(self, leg: Leg, rng: random.Random) -> None:
        self._leg = leg
        self._rng = rng

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        drawn = workers if len(workers) <= 2 else self._rng.sample(workers, 2)
        peers = frozenset(worker.peer for worker in drawn)

        def score(worker: WorkerView, partner: WorkerView | None) -> Score:
            return worker.peer not in peers, worker.load(self._leg)

        return score

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        is_other = np.ones(len(rows), np.bool_)
        is_other[range(len(rows)) if len(rows) <= 2 else self._rng.sample(range(len(rows)), 2)] = False
        return is_other, look.table.load(self._leg)[rows]

    def chosen(self, worker: WorkerView) -> None:
        return None
