"""Both kinds of fleet are set side by side on equal GPUs, and the verdict is the one the figures give, whichever that is."""

from __future__ import annotations

import pytest

from pd_serve.plan.candidates import Candidate, LoadShape, colocated, disaggregated, most_requests_per_s
from pd_serve.plan.curve import Trial
from pd_serve.plan.errors import PlanError
from pd_serve.plan.study import Models, Question, Study, study
from tests.unit.plan.arithmetic import Arithmetic, worker

LOAD = LoadShape(4000, 4000, 500)
MODEL = worker(4000, 500)
MODELS = Models((MODEL,), (MODEL,), (MODEL,))


class Stalling(Arithmetic):
    """Larger budgets carry more; those above `most` stall decode, so that few requests keep their limits."""

    def __init__(self, load: LoadShape, most: int) -> None:
        super().__init__(load)
        self.most = most
        self.looks: list[tuple[str, float, float]] = []

    def capacity(self, candidate: Candidate) -> float:
        full = most_requests_per_s(candidate, self.load)
        return full if candidate.is_disaggregated else full * candidate.chunk_budget / 8192

    def evaluate(self, candidate: Candidate, rate: float) -> Trial:
        if not candidate.is_disaggregated and candidate.chunk_budget > self.most:
            return Trial(rate, 0.5)
        return super().evaluate(candidate, rate)

    def look(self, candidate: Candidate, rate: float, times: float) -> Trial:
        self.looks.append((candidate.name, rate, times))
        return self.evaluate(candidate, rate)


def studied(question: Question, most: int) -> tuple[Study, Stalling]:
    stand = Stalling(LOAD, most)
    return study(question, stand.run, stand.look), stand


def test_one_pool_wins_where_no_budget_stalls_it() -> None:
    """The same GPUs, nothing that hurts: parting them can only lose to rounding."""
    found, _ = studied(Question(MODELS, LOAD, 0.0, num_gpus=3), most=8192)
    assert [arm.fleet.name for arm in found.arms] == ["1P2D", "3C 8192"]
    assert "one pool" in found.verdict[0]
    assert found.chosen == 1


def test_parting_wins_where_only_small_budgets_keep_the_limits() -> None:
    found, _ = studied(Question(MODELS, LOAD, 0.0, num_gpus=8), most=1024)
    assert [arm.fleet.name for arm in found.arms] == ["4P4D", "8C 1024"]
    assert found.verdict[0].startswith("part prefill from decode")
    assert found.chosen == 0
    assert "8.0" in found.verdict[1] or "7.9" in found.verdict[1] or "8.1" in found.verdict[1], found.verdict


def test_no_pool_at_all_within_the_limits_is_told() -> None:
    found, _ = studied(Question(MODELS, LOAD, 0.0, num_gpus=4), most=0)
    assert found.verdict[0].startswith("part prefill from decode")
    assert "only 2P2D has any goodput" in found.verdict[1]


def test_a_given_fleet_is_taken_and_one_pool_gets_its_gpus() -> None:
    fleet = disaggregated(1, 3, MODEL, MODEL)
    found, stand = studied(Question(MODELS, LOAD, 0.0, fleet=fleet, rate=0.5), most=8192)
    assert [arm.fleet.name for arm in found.arms] == ["1P3D", "4C 8192"]
    assert stand.looks == [("1P3D", 0.5, 1.0), ("4C 8192", 0.5, 1.0)]
    assert (found.rate, found.chosen) == (0.5, 0)


def test_one_pool_alone_has_no_verdict() -> None:
    found, _ = studied(Question(MODELS, LOAD, 0.0, fleet=colocated(2, MODEL, 512)), most=8192)
    assert [arm.fleet.name for arm in found.arms] == ["2C 512"]
    assert found.verdict == ()
    searched, _ = studied(Question(MODELS, LOAD, 0.0, fleet=colocated(2, MODEL)), most=1024)
    assert searched.arms[0].fleet.name == "2C 1024"


def test_without_goodput_only_the_load_is_looked_at() -> None:
    question = Question(MODELS, LOAD, 0.0, num_gpus=4, rate=1.0, has_goodput=False, budgets=(512, 8192))
    found, stand = studied(question, most=8192)
    assert not stand.tried
    assert found.curves == ()
    assert [arm.fleet.name for arm in found.arms] == ["2P2D", "4C 8192"]
    assert all(arm.goodput == {} for arm in found.arms)
    assert found.verdict[0].startswith("both serve this load alike")


def test_ten_times_the_load_is_looked_at_with_the_fleet_as_it_is_and_ten_times_as_large() -> None:
    fleet = disaggregated(1, 1, MODEL, MODEL)
    found, _ = studied(Question(MODELS, LOAD, 0.0, fleet=fleet, rate=0.5, scale=10), most=8192)
    assert [(arm.fleet.name, arm.at_load.rate) for arm in found.scaled] == [("1P1D", 5), ("10P10D", 5), ("2C 8192", 5), ("20C 8192", 5)]
    assert [arm.at_load.attainment for arm in found.scaled[:2]] == [pytest.approx(0.2), 1.0]


def test_limits_that_nothing_keeps_need_a_rate() -> None:
    fleet = colocated(2, MODEL, 512)
    with pytest.raises(PlanError, match="at any rate"):
        studied(Question(MODELS, LOAD, 0.0, fleet=fleet), most=0)
    found, _ = studied(Question(MODELS, LOAD, 0.0, fleet=fleet, rate=1.0), most=0)
    assert found.arms[0].at_load.attainment == 0.5
