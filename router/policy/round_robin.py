"""Every worker in turn: for comparison, and for workers and requests that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.ids import PeerId
from router.policy.base import Demand, Score, Scorer, WorkerView


class RoundRobin:
    """The worker that was used longest ago. What it remembers of workers that are gone is bounded."""

    looks_at_pairs = False
    reads_cached = False

    def __init__(self) -> None:
        self._turn = 0
        self._used_at: dict[PeerId, int] = {}

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        return self._score

    def chosen(self, worker: WorkerView) -> None:
        self._turn += 1
        self._used_at.pop(worker.peer, None)
        self._used_at[worker.peer] = self._turn
        if len(self._used_at) > MAX_KNOWN:
            del self._used_at[next(iter(self._used_at))]

    def _score(self, worker: WorkerView, partner: WorkerView | None) -> Score:
        return (self._used_at.get(worker.peer, 0),)


MAX_KNOWN = 8192
"""More than the addresses a router follows: the one forgotten has long been gone."""
