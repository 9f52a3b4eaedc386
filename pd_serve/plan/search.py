"""Finds the fleet with most goodput per GPU: prefill and decode workers and their TP degrees, and the chunk budget of colocated ones.

Pure: what runs the trials (`run`) is passed in, and takes a few fleets at a time, which it may share out to processes. Same input, same
answer, however many processes there are: what is passed over is decided between waves of a fixed size only.

Passed over is a fleet that cannot win: by the ratio formula (at its very best it carries less than another has been seen to), or because it
lies beyond one that was worse than its neighbour (along a fixed TP degree goodput rises to its best split and falls from there).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pd_serve.plan.candidates import CHUNK_BUDGETS, Candidate, LoadShape, colocated, families, most_requests_per_s
from pd_serve.plan.curve import STEP, Curve
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.plan.worker_model import WorkerModel

WAVE = 4
"""Fleets that are tried before the next are chosen."""
SLACK = 1.3
"""A finite load may for its duration be served faster than a steady one could be: limits allow a queue to grow for a while."""
_WORSE = STEP**2
"""Ratio of two goodputs that bisection cannot confuse."""
START = 0.6
"""Share of what a fleet could carry at its very best where its bisection begins."""


class CurveTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fleet to bisect."""

    candidate: Candidate
    start: float
    """Requests per second."""
    attainments: tuple[float, ...] = ATTAINMENTS


RunCurves = Callable[[Sequence[CurveTask]], Iterable[Curve]]
"""The curves of some tasks, in their order."""


class Passed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet that was not tried."""

    candidate: Candidate
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    curves: tuple[Curve, ...]
    """Most goodput per GPU at the first attainment first."""
    passed: tuple[Passed, ...] = ()

    def best(self, attainment: float) -> Curve | None:
        """Most goodput per GPU; the one of fewer GPUs, then of fewer prefill workers, where several have it. None where none has any."""
        able = [curve for curve in self.curves if curve.goodput(attainment) > 0]
        return min(able, key=lambda curve: _rank(curve, attainment), default=None)


def search_splits(candidates: Sequence[Candidate], load: LoadShape, itl_s: float, run: RunCurves, whole: bool = False) -> Found:
    """Tries them in the order of what they could carry. `whole`: passes over none. Raises PlanError without candidates."""
    if not candidates:
        raise PlanError("there are too few GPUs for one prefill and one decode worker")
    most = {candidate.name: most_requests_per_s(candidate, load, itl_s) for candidate in candidates}
    left = sorted(candidates, key=lambda candidate: (-most[candidate.name] / candidate.num_gpus, candidate.num_gpus, candidate.name))
    curves: list[Curve] = []
    passed: list[Passed] = []
    while left:
        wave, left = left[:WAVE], left[WAVE:]
        curves += run([CurveTask(candidate, START * most[candidate.name]) for candidate in wave])
        if not whole:
            rejected = {candidate.name: why for candidate in left if (why := _why_not(candidate, candidates, most[candidate.name], curves))}
            passed += [Passed(candidate, rejected[candidate.name]) for candidate in left if candidate.name in rejected]
            left = [candidate for candidate in left if candidate.name not in rejected]
    return Found(_ordered(curves), tuple(passed))


def search_budgets(
    count: int, model: WorkerModel, load: LoadShape, itl_s: float, run: RunCurves, budgets: Sequence[int] = CHUNK_BUDGETS
) -> Found:
    """Tries all: goodput has two hills over the budget. Small ones keep every step within the limit of gaps; large ones exceed it, but in
    so few steps that most requests have fewer late gaps than they may.
    """
    fleets = [colocated(count, model, budget) for budget in budgets]
    return Found(_ordered(run([CurveTask(fleet, START * most_requests_per_s(fleet, load, itl_s)) for fleet in fleets])))


def _why_not(candidate: Candidate, candidates: Sequence[Candidate], most: float, curves: Sequence[Curve]) -> str:
    """Empty: it may yet be the best, at one of the attainments."""
    reasons = []
    for attainment in ATTAINMENTS:
        best = max(curve.per_gpu(attainment) for curve in curves)
        at_most = most / candidate.num_gpus
        if best and at_most * SLACK < best:
            reasons.append(f"carries {at_most:.3g} requests/s per GPU at the very best")
        elif (worse := _worse_neighbour(candidate, candidates, curves, attainment)) is not None:
            reasons.append(f"lies beyond {worse.name}, which was worse than its neighbour")
        else:
            return ""
    return reasons[0]


def _worse_neighbour(candidate: Candidate, candidates: Sequence[Candidate], curves: Sequence[Curve], attainment: float) -> Candidate | None:
    """Between the candidate and the best of its family, one that is clearly worse than that best."""
    goodput = {curve.candidate.name: curve.per_gpu(attainment) for curve in curves}
    family = next(family for family in families(candidates) if candidate in family)
    tried = [place for place, other in enumerate(family) if other.name in goodput]
    if not tried:
        return None
    place = family.index(candidate)
    top = max(tried, key=lambda other: goodput[family[other].name])
    low, high = sorted((place, top))
    return next(
        (family[other] for other in tried if low < other < high and goodput[family[other].name] * _WORSE < goodput[family[top].name]), None
    )


def _ordered(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    return tuple(sorted(curves, key=lambda curve: _rank(curve, ATTAINMENTS[0])))


def _rank(curve: Curve, attainment: float) -> tuple[float, float, int, str]:
    """Most goodput first; of equal ones the better at the stricter attainment, then fewer GPUs. Goodputs within a step are equal."""
    first, strict = round(curve.per_gpu(attainment), 9), round(curve.per_gpu(ATTAINMENTS[-1]), 9)
    return (-first, -strict, curve.candidate.num_gpus, curve.candidate.name)
