"""What is observed of a step: tokens, its time, and the time that it kept the engine from anything else."""

from __future__ import annotations

import pytest

from pd_serve.engine.batch import Batch, BatchEntry, Phase, StepResult
from pd_serve.ids import AttemptId
from workers.step_samples import step_samples

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


def observed(phases: list[tuple[Phase, int]], begun_after: float | None) -> dict[tuple[str, str], float]:
    entries = tuple(BatchEntry(AttemptId(index), phase, (7,) * count, 0, (0,), None) for index, (phase, count) in enumerate(phases))
    samples = step_samples(StepResult(1, (), 10.0, 10.5), Batch(1, entries), begun_after)
    assert len({(sample.metric, sample.label) for sample in samples}) == len(samples)
    return {(sample.metric.removeprefix("pd_serve_"), sample.label): sample.value for sample in samples}


@pytest.mark.parametrize(
    ("phases", "label", "tokens"),
    [
        ([(PREFILL, 30), (PREFILL, 12)], "prefill", {"prefill": 42}),
        ([(DECODE, 1), (DECODE, 1)], "decode", {"decode": 2}),
        ([(DECODE, 1), (PREFILL, 12)], "mixed", {"decode": 1, "prefill": 12}),
    ],
)
def test_time_is_told_by_what_was_computed(phases: list[tuple[Phase, int]], label: str, tokens: dict[str, int]) -> None:
    assert observed(phases, None) == {
        ("step_seconds", ""): 0.5,
        ("compute_seconds_total", label): 0.5,
        **{("computed_tokens_total", phase): count for phase, count in tokens.items()},
    }


def test_the_gap_to_the_step_that_began_it_counts_as_compute_and_not_as_step() -> None:
    found = observed([(DECODE, 1)], begun_after=9.9)
    assert found[("compute_seconds_total", "decode")] == pytest.approx(0.6)
    assert found[("step_seconds", "")] == 0.5
