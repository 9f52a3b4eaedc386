"""The worker with the least predicted time to first token: what waits there and what it would have to compute, over the speed it was seen
to have, and the transfer to decode (prediction.py).

Source of the decode leg's cost: NVIDIA Dynamo's KV router, which adds what is to be brought there to what is active there.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Demand, Leg, Score, Scorer, WorkerView
from router.policy.columns import Look, Rows, ScoreColumns
from router.policy.prediction import local_ttft_s, remote_ttft_s


class LeastTTFT:
    """On decode: context tokens that every step reads, and tokens whose KV it lacks, together."""

    reads_cached = True
    is_columnar = True

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self.looks_at_pairs = leg is Leg.PREFILL

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        if self._leg is Leg.DECODE:
            return lambda worker, partner: (worker.load(Leg.DECODE) + demand.num_uncached(worker.peer),)

        def score(worker: WorkerView, partner: WorkerView | None) -> Score:
            seconds = local_ttft_s(worker, demand) if partner is None else remote_ttft_s(worker, partner, demand)
            return seconds, worker.prefill_backlog_tokens

        return score

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        if self._leg is Leg.DECODE:
            return (look.table.decode_load[rows] + look.num_uncached[rows],)
        seconds = look.local_ttft_s(rows) if partner is None else look.remote_ttft_s(rows, partner)
        return seconds, look.table.backlog[rows]

    def chosen(self, worker: WorkerView) -> None:
        return None
