"""Requests of one session to one worker, without any memory of it: the worker follows from the session's name and the workers' names, so
that every router says the same, and when a worker comes or goes only the sessions that are its own move.

Source: rendezvous hashing (highest random weight): Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
Transactions on Networking 6(1), 1998. Passing over a worker that has more than its share: Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from pd_serve.ids import PeerId
from router.policy.base import Demand, Leg, LegPolicy, Score, Scorer, WorkerView
from router.policy.columns import ByPeers, ColumnPolicy, Look, Rows, ScoreColumns

MAX_NAMES = 8192
"""Digests of workers' names that are kept: more than the addresses a router follows."""
_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class SessionAffinity:
    """Around a leg's policy, which has its say on requests without a session.

    A worker is passed over while its load is above `max_ratio` of the mean and more than `slack_tokens` above it: the session goes to its
    second worker meanwhile, which is as much its own as the first.
    """

    def __init__(self, inner: LegPolicy, leg: Leg, max_ratio: float, slack_tokens: int) -> None:
        self._inner = inner
        self._columnar = inner if isinstance(inner, ColumnPolicy) and inner.is_columnar else None
        self._leg = leg
        self._max_ratio = max_ratio
        self._slack_tokens = slack_tokens
        self._digests: dict[str, int] = {}
        self._column = ByPeers(self._new_column)

    @property
    def looks_at_pairs(self) -> bool:
        return self._inner.looks_at_pairs

    @property
    def reads_cached(self) -> bool:
        return self._inner.reads_cached

    @property
    def is_columnar(self) -> bool:
        return self._columnar is not None

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        if not demand.session:
            return self._inner.scorer(workers, demand)
        leg, session = self._leg, digest(demand.session)
        limit = self._limit(sum(worker.load(leg) for worker in workers), len(workers))

        def score(worker: WorkerView, partner: WorkerView | None) -> Score:
            return worker.load(leg) > limit, -weight(session, self._digest(worker.peer))

        return score

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        if not look.demand.session:
            assert self._columnar is not None
            return self._columnar.score_columns(look, rows, partner)
        load = look.table.load(self._leg)[rows]
        weights = _mixed(self._column.of(look.table.columns.peers)[rows] ^ np.uint64(digest(look.demand.session)))
        return load > self._limit(int(load.sum()), len(rows)), ~weights

    def chosen(self, worker: WorkerView) -> None:
        self._inner.chosen(worker)

    def _limit(self, load: int, num_workers: int) -> float:
        mean = load / num_workers
        return max(self._max_ratio * mean, mean + self._slack_tokens)

    def _digest(self, peer: PeerId) -> int:
        """By the worker's name, so that one that was restarted keeps its sessions."""
        found = self._digests.get(peer.worker_id)
        if found is None:
            if len(self._digests) >= MAX_NAMES:
                self._digests.clear()
            found = self._digests[peer.worker_id] = digest(peer.worker_id)
        return found

    def _new_column(self, peers: tuple[PeerId, ...]) -> npt.NDArray[np.uint64]:
        return np.array([digest(peer.worker_id) for peer in peers], np.uint64)


def digest(name: str) -> int:
    """Of a session or a worker, in 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def weight(session: int, worker: int) -> int:
    """Of a worker for a session, by their digests: the finalizer of splitmix64 (Steele, Lea and Flood, 2014) over both."""
    mixed = session ^ worker
    mixed = (mixed ^ mixed >> 30) * _FIRST & _MASK
    mixed = (mixed ^ mixed >> 27) * _SECOND & _MASK
    return mixed ^ mixed >> 31


def _mixed(both: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """weight(), of a column."""
    both = (both ^ (both >> np.uint64(30))) * np.uint64(_FIRST)
    both = (both ^ (both >> np.uint64(27))) * np.uint64(_SECOND)
    return both ^ (both >> np.uint64(31))
