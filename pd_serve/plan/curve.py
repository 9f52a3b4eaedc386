"""Goodput of one fleet: the highest rate at which enough of its requests keep both limits, found by bisection over rates.

Rates are powers of STEP, so that every fleet of a search is tried at the same ones and a rate that serves two attainments is tried once.
A trial is whatever `evaluate` says of a fleet at a rate: the simulator in earnest, arithmetic in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import msgspec

from pd_serve.bench.statistics import rate_at_attainment
from pd_serve.plan.candidates import Candidate
from pd_serve.plan.outcome import ATTAINMENTS

STEP = 1.05
"""Ratio of two neighbouring rates: goodput is found to 5 %."""
_FIRST_STRIDE = 8
_NUM_STRIDES = 4
"""Strides double: from where it starts, a bisection looks as far as STEP ** (8 + 16 + 32 + 64), a factor of 350."""

Points = tuple[tuple[float, float], ...]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fleet at one rate."""

    rate: float
    """Requests per second that were asked."""
    attainment: float
    """Share of all requests, those turned away included, that kept both limits."""
    num_requests: int = 0
    figures: dict[str, float] = {}
    """`ttft_s.p50`, `itl_s.p99`, `hit_rate`, `use.prefill`, ..."""
    rejected: dict[str, int] = {}
    """Requests turned away, by reason."""
    series: dict[str, Points] = {}
    """Curves for pictures: `ttft`, `itl` (seconds, share above); `use.ROLE`, `queue.ROLE` (seconds, value)."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet and all its trials, by rate."""

    candidate: Candidate
    trials: tuple[Trial, ...]

    def goodput(self, attainment: float) -> float:
        """Requests per second; 0.0 when not even the lowest rate kept it."""
        return rate_at_attainment(((trial.rate, trial.attainment) for trial in self.trials), attainment)

    def per_gpu(self, attainment: float) -> float:
        return self.goodput(attainment) / self.candidate.num_gpus

    def best_trial(self, attainment: float) -> Trial | None:
        """At its goodput; None where it has none."""
        rate = self.goodput(attainment)
        return next((trial for trial in self.trials if trial.rate == rate), None)


Evaluate = Callable[[Candidate, float], Trial]


def grid_rate(place: int) -> float:
    return float(STEP**place)


def grid_place(rate: float) -> int:
    """Of the nearest rate of the grid. `rate` > 0."""
    return round(math.log(rate) / math.log(STEP))


def goodput_curve(candidate: Candidate, evaluate: Evaluate, start: float, attainments: tuple[float, ...] = ATTAINMENTS) -> Curve:
    """Bisects from `start`, a rate that may be far off. Attainment is taken to fall with the rate."""
    trials: dict[int, Trial] = {}

    def keeps(place: int, attainment: float) -> bool:
        if place not in trials:
            trials[place] = evaluate(candidate, grid_rate(place))
        return trials[place].attainment >= attainment

    place = grid_place(start)
    for attainment in sorted(attainments):
        place = _highest(partial(keeps, attainment=attainment), place)
    return Curve(candidate, tuple(trials[place] for place in sorted(trials)))


def _highest(keeps: Callable[[int], bool], start: int) -> int:
    """The highest place that keeps, from `start` on; where none within reach does, or all do, the last that was tried."""
    place, is_kept = start, keeps(start)
    for stride in range(_NUM_STRIDES):
        further = place + (_FIRST_STRIDE << stride) * (1 if is_kept else -1)
        if keeps(further) != is_kept:
            break
        place = further
    else:
        return place
    low, high = sorted((place, further))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
