"""One fleet at one rate, simulated: what the search and the command line mean by a trial."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import msgspec

from pd_serve.plan.candidates import Candidate
from pd_serve.plan.curve import Points, Trial
from pd_serve.plan.errors import PlanError
from pd_serve.plan.load import Load
from pd_serve.plan.outcome import Outcome
from pd_serve.plan.scenario import Outage, Scenario
from pd_serve.plan.sim.fleet import Look, simulate
from pd_serve.plan.sim.network import LinkSpec
from pd_serve.plan.sim.spec import Failure, FleetSpec, Group
from pd_serve.protocol.link import Role

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.BOTH}
_MOST_POINTS = 400
"""Of a curve over time."""


class Trials:
    """Of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._config = scenario.router_config()

    def evaluate(self, candidate: Candidate, rate: float) -> Trial:
        """Without curves. Raises PlanError."""
        outcome = self._simulate(candidate, rate, self._scenario.load, None, None)
        return _trial(rate, outcome, {})

    def look(self, candidate: Candidate, rate: float, times: float, progress: Callable[[float], None]) -> Trial:
        """Watched, with `times` the number of requests of a synthetic load. `progress` hears the share that is over. Raises PlanError."""
        load = self._scenario.load
        if not load.trace and times > 1:
            load = msgspec.structs.replace(load, limit=round(load.limit * times))
        num_requests = load.num_requests()
        looks: list[Look] = []
        outcome = self._simulate(candidate, rate, load, lambda count: progress(count / num_requests), looks.append)
        progress(1.0)
        tails = {"ttft": tuple(outcome.ttft.curve()), "itl": tuple(outcome.itl.curve())}
        return _trial(rate, outcome, tails | _over_time(looks))

    def _simulate(
        self,
        candidate: Candidate,
        rate: float,
        load: Load,
        progress: Callable[[int], None] | None,
        watch: Callable[[Look], None] | None,
    ) -> Outcome:
        scenario, wire = self._scenario, self._scenario.wire
        spec = FleetSpec(
            groups=tuple(Group(pool.role, pool.count, pool.model) for pool in candidate.pools),
            link=LinkSpec(wire.bytes_per_s, wire.setup_s, wire.is_layerwise),
            config=self._config,
            failures=tuple(Failure(outage.at_s, _place(candidate, outage), outage.down_s) for outage in scenario.outages),
            chunk_budget=candidate.chunk_budget,
        )
        speed = rate / self._natural_rate if load.trace else rate
        return simulate(spec, load.requests_at(speed, scenario.seed), scenario.slo, scenario.seed, progress, watch)

    @cached_property
    def _natural_rate(self) -> float:
        return self._scenario.load.natural_rate()


def _place(candidate: Candidate, outage: Outage) -> int:
    """Where all workers are colocated, whichever role is named, the one of that number. Raises PlanError for one that is not there."""
    first = 0
    for pool in candidate.pools:
        if pool.role is _ROLES[outage.role] or pool.role is Role.BOTH:
            if outage.index < pool.count:
                return first + outage.index
            break
        first += pool.count
    raise PlanError(f"there is no {outage.role}-{outage.index} in {candidate.name} that could fail")


def _trial(rate: float, outcome: Outcome, series: dict[str, Points]) -> Trial:
    return Trial(rate, outcome.attainment, outcome.num_requests, outcome.figures(), dict(sorted(outcome.rejections.items())), series)


def _over_time(looks: list[Look]) -> dict[str, Points]:
    step = -(-len(looks) // _MOST_POINTS) or 1
    kept = looks[::step]
    series: dict[str, Points] = {"queue.router": tuple((look.at_s, float(look.num_queued)) for look in kept)}
    for name in {name: None for look in kept for name in look.roles}:
        there = [(look.at_s, look.roles[name]) for look in kept if name in look.roles]
        series[f"use.{name}"] = tuple((at_s, role.busy_share) for at_s, role in there)
        series[f"queue.{name}"] = tuple((at_s, float(role.num_waiting)) for at_s, role in there)
    return series
