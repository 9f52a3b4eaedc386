"""A cluster that is arithmetic: throughputs that depend on nothing, and as much served as the fullest pool lets through."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.plan.candidates import Candidate, LoadShape, most_requests_per_s
from pd_serve.plan.curve import Curve, Trial, goodput_curve
from pd_serve.plan.search import CurveTask
from pd_serve.plan.worker_model import WorkerModel


def worker(prefill_tokens_per_s: float, decode_tokens_per_s: float, num_gpus: int = 1) -> WorkerModel:
    """Throughputs that do not depend on batch or context."""
    return WorkerModel(
        name=f"toy x{num_gpus}",
        num_gpus=num_gpus,
        prefill=(0.0, 1 / prefill_tokens_per_s, 0.0),
        decode=(0.0, 0.0, 1 / decode_tokens_per_s),
        num_kv_tokens=1_000_000,
        kv_bytes_per_token=1,
        num_layers=1,
        handover_s=0.0,
    )


class Arithmetic:
    """Serves whatever keeps every pool below full, and of more than that the same number each second."""

    def __init__(self, load: LoadShape) -> None:
        self.load = load
        self.tried: list[str] = []

    def evaluate(self, candidate: Candidate, rate: float) -> Trial:
        return Trial(rate, min(1.0, self.capacity(candidate) / rate))

    def capacity(self, candidate: Candidate) -> float:
        return most_requests_per_s(candidate, self.load)

    def run(self, tasks: Sequence[CurveTask]) -> list[Curve]:
        self.tried += [task.candidate.name for task in tasks]
        return [goodput_curve(task.candidate, self.evaluate, task.start, task.attainments) for task in tasks]
