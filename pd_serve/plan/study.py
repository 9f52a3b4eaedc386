"""One study: fleets tried at rates, prefill apart and both phases in one pool side by side, and what follows. Called by `plan simulate`.

Pure but for what it is given to run: `run` makes curves of goodput, `look` makes one trial that is watched. A given fleet is taken as it
is; for a number of GPUs the split is searched. One pool gets the same number of GPUs and the best chunk budget there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pd_serve.plan.candidates import CHUNK_BUDGETS, Candidate, LoadShape, Pool, colocated, most_requests_per_s, splits
from pd_serve.plan.curve import Curve, Trial
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.plan.search import START, CurveTask, Found, Passed, RunCurves, search_budgets, search_splits
from pd_serve.plan.worker_model import WorkerModel

Look = Callable[[Candidate, float, float], Trial]
"""One watched trial: fleet, requests per second, and how many times the load's number of requests."""


@dataclass(frozen=True, slots=True)
class Models:
    """By role, one for each TP degree."""

    prefill: tuple[WorkerModel, ...]
    decode: tuple[WorkerModel, ...]
    colocated: tuple[WorkerModel, ...]


@dataclass(frozen=True, slots=True)
class Question:
    models: Models
    shape: LoadShape
    itl_s: float
    """The limit; 0: none."""
    fleet: Candidate | None = None
    """To be taken as it is; None: searched."""
    num_gpus: int = 0
    """To search for."""
    whole_grid: bool = False
    """Every split that fits, for the map; none is passed over."""
    rate: float = 0.0
    """Of the load; 0: the goodput of what was found."""
    has_goodput: bool = True
    """Otherwise only the load at its rate is looked at."""
    budgets: tuple[int, ...] = CHUNK_BUDGETS
    scale: float = 0.0
    """How many times the load to look at besides; 0: not."""


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet with what it does."""

    fleet: Candidate
    goodput: dict[str, float]
    """Requests per second by attainment, `0.9` and `0.99`; empty: not asked."""
    at_load: Trial

    def per_gpu(self, attainment: float) -> float:
        return self.goodput.get(str(attainment), 0.0) / self.fleet.num_gpus


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rate: float
    arms: tuple[Arm, ...]
    """Prefill apart first, where it was asked."""
    curves: tuple[Curve, ...]
    """All that were bisected, the best of each kind first."""
    passed: tuple[Passed, ...]
    scaled: tuple[Arm, ...]
    """At `scale` times the rate: each fleet as it is, then as many times as large."""
    verdict: tuple[str, ...]
    chosen: int
    """Place among the arms: of the fleet that was given, or that the verdict is for."""


def study(question: Question, run: RunCurves, look: Look) -> Study:
    """Raises PlanError."""
    apart = _apart(question, run)
    pools = _pools(question, run, apart)
    kinds = [found for found in (apart, pools) if found is not None]
    if question.has_goodput:
        chosen = [curve for found in kinds if (curve := _best(found)) is not None]
        rate = question.rate or max((curve.goodput(ATTAINMENTS[0]) for curve in chosen), default=0.0)
        if not rate:
            raise PlanError("no fleet keeps the limits for 90 % of requests at any rate: give a --rate to see by how much they are missed")
        arms = [Arm(curve.candidate, _goodputs(curve), look(curve.candidate, rate, 1.0)) for curve in chosen]
    else:
        rate = question.rate
        arms = [_best_at_load([Arm(curve.candidate, {}, look(curve.candidate, rate, 1.0)) for curve in found.curves]) for found in kinds]
    scaled = [arm for chosen_arm in arms for arm in _scaled(chosen_arm, question.scale, rate, look)] if question.scale else []
    words = _words(apart, pools, arms)
    return Study(
        rate=rate,
        arms=tuple(arms),
        curves=tuple(curve for found in kinds for curve in found.curves if curve.trials),
        passed=tuple(passed for found in kinds for passed in found.passed),
        scaled=tuple(scaled),
        verdict=_verdict(words, apart, pools, arms) if words else (),
        chosen=0 if question.fleet is not None or not words or "more" in words.values() else 1,
    )


def _words(apart: Found | None, pools: Found | None, arms: Sequence[Arm]) -> dict[str, str]:
    """How much prefill apart serves within the limits beside one pool: `more`, `as much` or `less`, by where. Empty with one of them."""
    if apart is None or pools is None or len(arms) < 2:
        return {}
    if not arms[0].goodput:
        return {_THIS_LOAD: _word(*(arm.at_load.attainment for arm in arms))}
    return {
        f"{attainment:.0%} attainment": _word(*(_per_gpu(found.best(attainment), attainment) for found in (apart, pools)))
        for attainment in ATTAINMENTS
    }


def _per_gpu(curve: Curve | None, attainment: float) -> float:
    return curve.per_gpu(attainment) if curve is not None else 0.0


def _verdict(words: dict[str, str], apart: Found | None, pools: Found | None, arms: Sequence[Arm]) -> tuple[str, ...]:
    """Each kind with what is best at the attainment in question."""
    assert apart is not None, "there are words for two kinds only"
    assert pools is not None, "there are words for two kinds only"
    lines = [
        f"at {attainment:.0%} attainment {_compared(apart.best(attainment), pools.best(attainment), attainment)}"
        for attainment in ATTAINMENTS
        if arms[0].goodput
    ]
    kept = [f"{arm.fleet.name} keeps the limits for {arm.at_load.attainment:.1%} of requests" for arm in arms]
    return (_advice(words), *lines, f"at {arms[0].at_load.rate:.3g} requests/s {kept[0]}, {kept[1]}")


def _advice(found: dict[str, str]) -> str:
    told = ", ".join(f"{word} at {where}" for where, word in found.items())
    words = set(found.values())
    if list(found) == [_THIS_LOAD] and words == {"as much"}:
        return "both serve this load alike; how far each is from its end is what goodput tells"
    if words == {"as much"}:
        return "use one pool with chunked prefill: parting gains nothing within the limits that a search could tell, and is more to run"
    if "less" not in words:
        return f"part prefill from decode: within the limits it serves {told}"
    if "more" not in words:
        return f"use one pool with chunked prefill: prefill apart serves within the limits {told}"
    return f"it depends on how many requests have to keep the limits: prefill apart serves {told}"


_THIS_LOAD = "this load"
_CLEAR = 1.08
"""Ratio of two goodputs that is more than what bisection leaves open."""


def _word(ours: float, theirs: float) -> str:
    if ours == theirs:
        return "as much"
    ratio = ours / theirs if theirs else float("inf")
    return "more" if ratio > _CLEAR else "less" if ratio < 1 / _CLEAR else "as much"


def _compared(ours: Curve | None, theirs: Curve | None, attainment: float) -> str:
    if ours is None and theirs is None:
        return "neither has any goodput"
    if ours is None or theirs is None:
        return " and ".join(f"only {curve.candidate.name} has any goodput" for curve in (ours, theirs) if curve is not None)
    first, second = ours.per_gpu(attainment), theirs.per_gpu(attainment)
    told = f"{first:.3g} against {second:.3g} requests/s"
    return f"{ours.candidate.name} has {first / second:.2f} times the goodput per GPU of {theirs.candidate.name} ({told})"


# ---- the two kinds


def _apart(question: Question, run: RunCurves) -> Found | None:
    """Prefill and decode on workers of their own; None where the question is of one pool only."""
    if question.fleet is not None:
        if not question.fleet.is_disaggregated:
            return None
        return Found(tuple(_curves([question.fleet], question, run)))
    models = question.models
    candidates = splits(question.num_gpus, models.prefill, models.decode, question.whole_grid)
    if not question.has_goodput:
        best = max(candidates, key=lambda fleet: most_requests_per_s(fleet, question.shape, question.itl_s), default=None)
        if best is None:
            raise PlanError("there are too few GPUs for one prefill and one decode worker")
        return Found((Curve(best, ()),))
    return search_splits(candidates, question.shape, question.itl_s, run, question.whole_grid)


def _pools(question: Question, run: RunCurves, apart: Found | None) -> Found | None:
    """One pool of as many GPUs, of each TP degree with its best budget."""
    fleet = question.fleet
    if fleet is not None and not fleet.is_disaggregated:
        pool = fleet.pools[0]
        budgets = (fleet.chunk_budget,) if fleet.chunk_budget else question.budgets
        return _budgets(pool.count, pool.model, budgets, question, run)
    num_gpus = fleet.num_gpus if fleet is not None else question.num_gpus
    if apart is not None and apart.curves and fleet is None:
        num_gpus = max(curve.candidate.num_gpus for curve in apart.curves)
    found = [
        _budgets(num_gpus // model.num_gpus, model, question.budgets, question, run)
        for model in question.models.colocated
        if model.num_gpus <= num_gpus
    ]
    if not found:
        return None
    curves = [curve for each in found for curve in each.curves]
    best = sorted(curves, key=lambda curve: [-curve.per_gpu(attainment) for attainment in ATTAINMENTS])
    return Found(tuple(best), tuple(passed for each in found for passed in each.passed))


def _budgets(count: int, model: WorkerModel, budgets: tuple[int, ...], question: Question, run: RunCurves) -> Found:
    fleets = [colocated(count, model, budget) for budget in budgets]
    if len(budgets) == 1 or not question.has_goodput:
        return Found(tuple(_curves(fleets, question, run)))
    return search_budgets(count, model, question.shape, question.itl_s, run, budgets)


def _curves(fleets: Sequence[Candidate], question: Question, run: RunCurves) -> Iterable[Curve]:
    if not question.has_goodput:
        return [Curve(fleet, ()) for fleet in fleets]
    return run([CurveTask(fleet, START * most_requests_per_s(fleet, question.shape, question.itl_s)) for fleet in fleets])


def _best(found: Found) -> Curve | None:
    """The strictest attainment that any of them keeps decides between those that are equal at the first."""
    return found.best(ATTAINMENTS[0]) or (found.curves[0] if found.curves else None)


def _best_at_load(arms: Sequence[Arm]) -> Arm:
    """Most requests within the limits; the shorter tail of gaps where several keep them for as many."""
    return max(arms, key=lambda arm: (round(arm.at_load.attainment, 3), -arm.at_load.figures.get("itl_s.p99", 0.0)))


def _goodputs(curve: Curve) -> dict[str, float]:
    return {str(attainment): curve.goodput(attainment) for attainment in ATTAINMENTS}


# ---- more of the same load


def _scaled(arm: Arm, scale: float, rate: float, look: Look) -> Iterable[Arm]:
    times = max(1, round(scale))
    larger = Candidate(tuple(Pool(pool.role, pool.count * times, pool.model) for pool in arm.fleet.pools), arm.fleet.chunk_budget)
    for fleet in (arm.fleet, larger):
        yield Arm(fleet, {}, look(fleet, rate * scale, scale))
