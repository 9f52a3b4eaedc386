"""Memory does not grow with the number of requests, and a large cluster's run ends with nothing left."""

from __future__ import annotations

import resource

import pytest

from pd_serve.bench.statistics import Slo
from pd_serve.plan.sim.fleet import simulate
from tests.unit.plan.sim.fleets import around, config_of, fleet, poisson

LARGE = {"max_queued_requests": 100_000, "max_open_requests": 1_000_000}


@pytest.mark.slow
def test_a_hundred_thousand_requests_take_no_more_memory_than_half_as_many() -> None:
    peaks: dict[int, int] = {}

    def told(num_over: int) -> None:
        peaks[num_over] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    spec = fleet(50, 50, config=config_of(router=LARGE))
    outcome = simulate(spec, poisson(700, 100_000, around(1000), around(200)), Slo(1.0, 0.05), progress=told)
    assert outcome.num_served == 100_000
    assert outcome.attainment > 0.99
    assert peaks[100_000] - peaks[50_000] < 8 * 1024, "KiB"
