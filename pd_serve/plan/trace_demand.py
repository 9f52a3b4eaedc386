"""What a published trace asks for, on average and in its busiest minute. Called by `pd-serve plan ratio --trace`."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

import msgspec

from pd_serve.bench.trace import Scaling, TracePlans, read_trace
from pd_serve.plan.errors import PlanError

PEAK_S = 60.0


class TraceDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_requests: int
    seconds: float
    prompt_tokens: float
    """Mean; as output_tokens."""
    output_tokens: float
    requests_per_s: float
    peak_requests_per_s: float
    """Of the PEAK_S in which most came; of a shorter trace, its mean."""
    ideal_hit_rate: float
    """Share of prompt tokens that a cache which forgets nothing would have; 0 in formats without hash ids."""


def read_trace_demand(path: Path, speed_up: float = 1.0) -> TraceDemand:
    """Raises BenchError for a file that is no trace, PlanError for one that has no rate."""
    if not 0 < speed_up < float("inf"):
        raise PlanError(f"--speed-up {speed_up:g}: expected more than 0")
    requests = read_trace(path)
    moments = [request.at_s / speed_up for request in requests]
    seconds = moments[-1]
    if seconds <= 0:
        raise PlanError(f"{path}: its {len(requests)} requests come at one moment, which is no rate")
    # Windows that begin with a request: one of them holds the most.
    most = max(bisect_left(moments, moment + PEAK_S) - index for index, moment in enumerate(moments))
    mean = (len(requests) - 1) / seconds
    return TraceDemand(
        num_requests=len(requests),
        seconds=seconds,
        prompt_tokens=sum(request.num_prompt_tokens for request in requests) / len(requests),
        output_tokens=sum(request.num_output_tokens for request in requests) / len(requests),
        requests_per_s=mean,
        peak_requests_per_s=most / PEAK_S if seconds > PEAK_S else mean,
        ideal_hit_rate=TracePlans(requests, Scaling()).ideal_hit_rate(),
    )
