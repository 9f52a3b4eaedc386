"""What `bench fit` has measured, and the terms by which each of it is explained. Pure.

A prompt's compute is that of its steps: a + b n + c n (n + 2 p) for a chunk of n tokens behind p. Kernels that take rows in certain numbers
only make that a staircase: then n is rounded up, and each of their calls costs something too (calls_of). Which of CALL_SIZES describes the
prompts best is found out. A decode step's time is a gap of a
stream: a + b context + c batch, where it is known from the streams' own tokens who took part and how long each was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from pd_serve.bench.least_squares import Fitted, fit, quantiles
from pd_serve.bench.records import RequestRecord

CALL_SIZES: tuple[tuple[int, ...], ...] = ((), (64,), (128, 64), (256, 128, 64), (512, 256, 128, 64))
"""Numbers of rows that a call may have. The last is pd-serve's on processors with AMX (pd_serve/engine/linear.py)."""
_BETTER = 0.7
"""Share of the plain cost's squared residuals below which a staircase is believed."""
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
    call_sizes: tuple[int, ...] = ()
    """Of prompts: see calls_of. Where there are any, the fourth coefficient is of each call."""

    @property
    def error(self) -> float:
        """Sum of the cases' squared relative residuals."""
        return sum((fitted / measured - 1) ** 2 for _, measured, fitted in self.cases)


def chunks_of(num_tokens: int, num_cached: int, budget: int) -> list[tuple[int, int]]:
    """(n, p) of each step of a prompt that is alone."""
    return [(min(budget, num_tokens - done), num_cached + done) for done in range(0, num_tokens, budget)]


def calls_of(num_tokens: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(calls, rows that they compute): as many of each size as fit, the largest first; what is left goes into one more of the last. Without
    sizes one call of all."""
    if not sizes:
        return min(1, num_tokens), num_tokens
    num_calls, left = 0, num_tokens
    for size in sizes:
        num_calls += left // size
        left %= size
    num_rows = num_tokens - left
    return (num_calls + 1, num_rows + sizes[-1]) if left else (num_calls, num_rows)


def prompt_terms(sample: PromptSample, budget: int, sizes: tuple[int, ...] = ()) -> tuple[float, ...]:
    """Of a, b, c and, with sizes, of each call."""
    chunks = chunks_of(sample.num_tokens, sample.num_cached, budget)
    calls = [calls_of(count, sizes) for count, _ in chunks]
    num_pairs = sum(count * (count + 2 * cached) for count, cached in chunks)
    terms = float(len(chunks)), float(sum(rows for _, rows in calls)), float(num_pairs)
    return (*terms, float(sum(count for count, _ in calls))) if sizes else terms


def fit_prompts(samples: Sequence[PromptSample], budget: int) -> StepTimes:
    """Raises BenchError."""
    cases = [f"{sample.num_tokens} behind {sample.num_cached}" for sample in samples]
    values = [sample.compute_s for sample in samples]
    plain, *staircases = (
        msgspec.structs.replace(_fit(cases, [prompt_terms(sample, budget, sizes) for sample in samples], values), call_sizes=sizes)
        for sizes in CALL_SIZES
        if len(set(cases)) > 3 + bool(sizes)
    )
    best = min(staircases, key=lambda times: times.error, default=plain)
    return best if best.error < _BETTER * plain.error else plain


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
    num_terms = len(terms[0])
    typical = {case: [median(terms[index][place] for index in indexes) for place in range(num_terms)] for case, indexes in by_case.items()}
    fitted = fit([typical[case] for case in by_case], [middle[case] for case in by_case])
    noise = [value / fitted.value(row) for row, value in zip(terms, values, strict=True)]
    told = tuple((case, middle[case], fitted.value(typical[case])) for case in by_case)
    return StepTimes(fitted, quantiles(noise), told)
