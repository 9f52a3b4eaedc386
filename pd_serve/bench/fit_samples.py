"""What `bench fit` has measured, and the terms by which each of it is explained. Pure.

A prompt's compute is that of its steps: a + b n + c n (n + 2 p) for a chunk of n tokens behind p. A decode step's time is a gap of a
stream: a + b context + c batch, where it is known from the streams' own tokens who took part and how long each was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from pd_serve.bench.least_squares import Fitted, fit, quantiles
from pd_serve.bench.records import RequestRecord

_LEAST_SHARE = 4
"""A case of fewer samples than the largest's by this is passed over: its median is of chance."""


class PromptSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt that was alone."""

    num_tokens: int
    """Computed."""
    num_cached: int
    ttft_s: float
    compute_s: float
    """From the begin of its first step to the end of its last."""
    handover_s: float
    """Reserving where it decodes, and from the end of compute to the word that it is there; 0.0 where nothing was handed over."""

    @property
    def request_s(self) -> float:
        """All the rest of its first token's way."""
        return max(0.0, self.ttft_s - self.compute_s - self.handover_s)


class StepSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decode step."""

    batch: int
    context: int
    """Tokens of all its sequences together."""
    step_s: float
    case: str
    """Steps of one case are alike."""


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two costs, fitted to the medians of the cases; noise is of every sample."""

    fitted: Fitted
    noise: tuple[float, ...]
    """Measured by fitted: quantiles."""
    cases: tuple[tuple[str, float, float], ...]
    """Name, measured (median), fitted."""


def chunks_of(num_tokens: int, num_cached: int, budget: int) -> list[tuple[int, int]]:
    """(n, p) of each step of a prompt that is alone."""
    return [(min(budget, num_tokens - done), num_cached + done) for done in range(0, num_tokens, budget)]


def prompt_terms(sample: PromptSample, budget: int) -> tuple[float, float, float]:
    chunks = chunks_of(sample.num_tokens, sample.num_cached, budget)
    return float(len(chunks)), float(sample.num_tokens), float(sum(count * (count + 2 * cached) for count, cached in chunks))


def fit_prompts(samples: Sequence[PromptSample], budget: int) -> StepTimes:
    """Raises BenchError."""
    cases = [f"{sample.num_tokens} behind {sample.num_cached}" for sample in samples]
    return _fit(cases, [prompt_terms(sample, budget) for sample in samples], [sample.compute_s for sample in samples])


def fit_steps(samples: Sequence[StepSample]) -> StepTimes:
    """Raises BenchError."""
    terms = [(1.0, float(sample.context), float(sample.batch)) for sample in samples]
    return _fit([sample.case for sample in samples], terms, [sample.step_s for sample in samples])


def steps_of(records: Sequence[RequestRecord]) -> list[StepSample]:
    """Of streams that ran together and ended one after the other: every gap of the longest from the moment at which all had begun.

    A stream takes part in a step if its own last token is not older; it then has its prompt and what it had brought before the step.
    """
    longest = max(records, key=lambda record: len(record.token_s))
    all_began_s = max(record.token_s[0] for record in records)
    size = round(sum(record.num_prompt_tokens for record in records) / len(records))
    samples: list[StepSample] = []
    for begin_s, end_s in pairwise(longest.token_s):
        if begin_s < all_began_s:
            continue
        # Tokens of one step come within a small part of it, in any order.
        slack_s = (end_s - begin_s) / 2
        running = [record for record in records if record.token_s[-1] >= end_s - slack_s]
        context = sum(record.num_prompt_tokens + sum(at_s <= begin_s + slack_s for at_s in record.token_s) for record in running)
        samples.append(StepSample(len(running), context, end_s - begin_s, f"{len(running)} x {size}"))
    return samples


def _fit(cases: Sequence[str], terms: Sequence[Sequence[float]], values: Sequence[float]) -> StepTimes:
    by_case: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        by_case.setdefault(case, []).append(index)
    most = max(len(indexes) for indexes in by_case.values())
    by_case = {case: indexes for case, indexes in by_case.items() if len(indexes) >= most / _LEAST_SHARE}
    middle = {case: float(median(values[index] for index in indexes)) for case, indexes in by_case.items()}
    typical = {case: [median(terms[index][place] for index in indexes) for place in range(3)] for case, indexes in by_case.items()}
    fitted = fit([typical[case] for case in by_case], [middle[case] for case in by_case])
    noise = [value / fitted.value(row) for row, value in zip(terms, values, strict=True)]
    told = tuple((case, middle[case], fitted.value(typical[case])) for case in by_case)
    return StepTimes(fitted, quantiles(noise), told)
