"""Requests of one session to one worker, without any memory of it: the worker follows from the session's name and the workers' names, so
that every router says the same, and when a worker comes or goes only the sessions that are its own move.

Source: rendezvous hashing (highest random weight): Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", IEEE/ACM
Transactions on Networking 6(1), 1998. Passing over a worker that has more than its share: Mirrokni, Thorup and Zadimoghaddam, "Consistent
Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from router.policy.base import Demand, Leg, LegPolicy, Score, Scorer, WorkerView


class SessionAffinity:
    """Around a leg's policy, which has its say on requests without a session.

    A worker is passed over while its load is above `max_ratio` of the mean and more than `slack_tokens` above it: the session goes to its
    second worker meanwhile, which is as much its own as the first.
    """

    def __init__(self, inner: LegPolicy, leg: Leg, max_ratio: float, slack_tokens: int) -> None:
        self._inner = inner
        self._leg = leg
        self._max_ratio = max_ratio
        self._slack_tokens = slack_tokens

    @property
    def looks_at_pairs(self) -> bool:
        return self._inner.looks_at_pairs

    @property
    def reads_cached(self) -> bool:
        return self._inner.reads_cached

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        if not demand.session:
            return self._inner.scorer(workers, demand)
        leg, key = self._leg, blake2b(demand.session.encode()).digest()
        mean = sum(worker.load(leg) for worker in workers) / len(workers)
        limit = max(self._max_ratio * mean, mean + self._slack_tokens)

        def score(worker: WorkerView, partner: WorkerView | None) -> Score:
            return worker.load(leg) > limit, -weight(key, worker.peer.worker_id)

        return score

    def chosen(self, worker: WorkerView) -> None:
        self._inner.chosen(worker)


def weight(session: bytes, worker_id: str) -> int:
    """Of a worker for the digest of a session's name. By the worker's name, so that one that was restarted keeps its sessions."""
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8, key=session).digest())
