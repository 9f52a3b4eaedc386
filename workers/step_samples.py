"""What is observed of each engine step. Pure; called by the control loop once per step."""

from __future__ import annotations

from pd_serve.engine.batch import Batch, Phase, StepResult
from pd_serve.protocol.link import Sample

MIXED = "mixed"


def step_samples(result: StepResult, batch: Batch, begun_after: float | None) -> tuple[Sample, ...]:
    """`begun_after`: when the step ended whose end began this one; None where the engine had waited for work.

    The time between two steps that follow each other counts as compute: meanwhile the engine can do nothing else, so tokens by these
    seconds are what it can do.
    """
    num_tokens = {phase: sum(len(entry.token_ids) for entry in batch.entries if entry.phase is phase) for phase in Phase}
    phases = [phase.value for phase, count in num_tokens.items() if count]
    since = result.started_at if begun_after is None else begun_after
    return (
        Sample("pd_serve_step_seconds", result.ended_at - result.started_at),
        Sample("pd_serve_compute_seconds_total", max(0.0, result.ended_at - since), phases[0] if len(phases) == 1 else MIXED),
        *(Sample("pd_serve_computed_tokens_total", float(num_tokens[phase]), phase.value) for phase in Phase if num_tokens[phase]),
    )
