"""Every worker in turn: for comparison, and for workers and requests that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pd_serve.ids import PeerId
from router.policy.base import Demand, Score, Scorer, WorkerView
from router.policy.columns import ByPeers, Ints, Look, Rows, ScoreColumns


class RoundRobin:
    """The worker that was used longest ago. What it remembers of workers that are gone is bounded."""

    looks_at_pairs = False
    reads_cached = False
    is_columnar = True

    def __init__(self) -> None:
        self._turn = 0
        self._used_at: dict[PeerId, int] = {}
        self._column = ByPeers(self._new_column)

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        return self._score

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        return (self._column.of(look.table.columns.peers)[rows],)

    def chosen(self, worker: WorkerView) -> None:
        self._turn += 1
        self._used_at.pop(worker.peer, None)
        self._used_at[worker.peer] = self._turn
        self._column.change(worker.peer, self._turn)
        if len(self._used_at) > MAX_KNOWN:
            oldest = next(iter(self._used_at))
            del self._used_at[oldest]
            self._column.change(oldest, 0)

    def _new_column(self, peers: tuple[PeerId, ...]) -> Ints:
        return np.array([self._used_at.get(peer, 0) for peer in peers], np.int64)

    def _score(self, worker: WorkerView, partner: WorkerView | None) -> Score:
        return (self._used_at.get(worker.peer, 0),)


MAX_KNOWN = 8192
"""More than the addresses a router follows: the one forgotten has long been gone."""
