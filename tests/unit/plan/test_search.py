"""The search finds the splits that arithmetic gives, and says what it did not try. The trials are arithmetic too."""

from __future__ import annotations

import pytest

from pd_serve.plan.candidates import Candidate, LoadShape, colocated, disaggregated, splits
from pd_serve.plan.curve import STEP, Curve, Trial, goodput_curve, grid_place, grid_rate
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.plan.search import Found, search_budgets, search_splits
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import Role
from tests.unit.plan.arithmetic import Arithmetic, worker


def found(num_gpus: int, model: WorkerModel, load: LoadShape) -> tuple[Found, Arithmetic]:
    arithmetic = Arithmetic(load)
    return search_splits(splits(num_gpus, [model], [model]), load, 0.0, arithmetic.run), arithmetic


def best(result: Found, attainment: float = 0.99) -> Curve:
    curve = result.best(attainment)
    assert curve is not None
    return curve


# ---- one curve


@pytest.mark.parametrize("start", [0.1, 1.0, 9.9, 1000.0])
def test_goodput_is_found_to_one_step_from_wherever_the_bisection_starts(start: float) -> None:
    fleet = colocated(1, worker(1000, 1000))
    curve = goodput_curve(fleet, lambda _, rate: Trial(rate, min(1.0, 10.0 / rate)), start)
    assert 10.0 / STEP <= curve.goodput(0.99) <= 10.0 / 0.99
    assert 10.0 / STEP <= 0.9 * curve.goodput(0.9) <= 10.0
    assert curve.per_gpu(0.9) == curve.goodput(0.9)


def test_no_rate_is_tried_twice_and_both_attainments_share_them() -> None:
    rates: list[float] = []

    def evaluate(_: Candidate, rate: float) -> Trial:
        rates.append(rate)
        return Trial(rate, min(1.0, 10.0 / rate))

    curve = goodput_curve(colocated(1, worker(1000, 1000)), evaluate, 6.0)
    assert len(rates) == len(set(rates)) == len(curve.trials) <= 12
    assert [trial.rate for trial in curve.trials] == sorted(rates)


def test_a_fleet_that_never_keeps_the_limits_has_no_goodput() -> None:
    curve = goodput_curve(colocated(1, worker(1000, 1000)), lambda _, rate: Trial(rate, 0.5), 5.0)
    assert [curve.goodput(attainment) for attainment in ATTAINMENTS] == [0.0, 0.0]
    assert curve.best_trial(0.9) is None


def test_rates_lie_on_one_grid() -> None:
    assert [grid_place(grid_rate(place)) for place in (-40, 0, 7, 200)] == [-40, 0, 7, 200]


# ---- splits


def test_equal_demands_take_half_and_half() -> None:
    """4,000 in, 500 out, T_P 4,000 and T_D 500 per GPU: R = 1."""
    result, _ = found(8, worker(4000, 500), LoadShape(4000, 4000, 500))
    assert best(result).candidate.name == "4P4D"
    assert best(result).goodput(0.99) == pytest.approx(4.0, rel=0.05)


def test_thirty_requests_per_second_take_three_of_each() -> None:
    """30 requests/s of 2,000 in and 300 out, T_P 20,000 and T_D 3,000: 3P3D carries them, and nothing smaller does."""
    load = LoadShape(2000, 2000, 300)
    result, arithmetic = found(6, worker(20_000, 3000), load)
    assert best(result).candidate.name == "3P3D"
    assert best(result).goodput(0.99) == pytest.approx(30, rel=0.05)
    assert arithmetic.capacity(disaggregated(3, 3, worker(20_000, 3000), worker(20_000, 3000))) == pytest.approx(30)


def test_four_times_the_prompt_takes_four_times_the_prefill() -> None:
    """With 8,000 in: 12 prefill, decode unchanged."""
    result, _ = found(15, worker(20_000, 3000), LoadShape(8000, 8000, 300))
    assert best(result).candidate.name == "12P3D"


def test_long_outputs_take_nearly_all_for_decode() -> None:
    """1,000 in, 8,000 out: R = 1/64."""
    result, _ = found(65, worker(4000, 500), LoadShape(1000, 1000, 8000))
    assert best(result).candidate.name == "1P64D"


def test_cached_prompts_need_no_prefill() -> None:
    result, _ = found(8, worker(4000, 500), LoadShape(4000, 4000 / 3, 500))
    assert best(result).candidate.name == "2P6D"


def test_most_of_a_large_space_is_passed_over_and_each_with_its_reason() -> None:
    load = LoadShape(4000, 4000, 500)
    result, arithmetic = found(32, worker(4000, 500), load)
    assert best(result).candidate.name == "16P16D"
    assert len(arithmetic.tried) == len(result.curves) < 16
    assert len(result.curves) + len(result.passed) == 31
    assert all("at the very best" in passed.why or "beyond" in passed.why for passed in result.passed)


def test_passing_over_loses_nothing() -> None:
    for load in (LoadShape(4000, 4000, 500), LoadShape(500, 500, 700), LoadShape(9000, 1000, 90)):
        model = worker(4000, 500)
        candidates = splits(12, [model], [model])
        quick = search_splits(candidates, load, 0.0, Arithmetic(load).run)
        whole = search_splits(candidates, load, 0.0, Arithmetic(load).run, whole=True)
        assert len(whole.curves) == len(candidates)
        for attainment in ATTAINMENTS:
            assert best(quick, attainment).candidate == best(whole, attainment).candidate


def test_the_better_degree_of_each_phase_is_found() -> None:
    """Two GPUs compute prompts at less than twice one's pace, but generate more than twice as fast (the weights leave room for a batch)."""
    one, two = worker(4000, 400), worker(7000, 1000, num_gpus=2)
    load = LoadShape(4000, 4000, 500)
    result = search_splits(splits(8, [one, two], [one, two]), load, 0.0, Arithmetic(load).run)
    assert best(result).candidate.degrees() == (1, 2)
    assert best(result).candidate.name == "4P2D tp 1/2"


def test_splits_leave_no_room_for_another_prefill_worker() -> None:
    one, two = worker(1, 1), worker(1, 1, num_gpus=2)
    assert [each.name for each in splits(4, [one], [one])] == ["3P1D", "2P2D", "1P3D"]
    assert [each.name for each in splits(5, [two], [two])] == ["1P1D tp 2/2"]
    assert len(splits(4, [one], [one], whole_grid=True)) == 6
    assert disaggregated(3, 1, one, two).count(Role.DECODE) == 1


def test_too_few_gpus_are_an_error() -> None:
    model = worker(1, 1)
    with pytest.raises(PlanError, match="too few"):
        search_splits(splits(1, [model], [model]), LoadShape(1, 1, 1), 0.0, Arithmetic(LoadShape(1, 1, 1)).run)


# ---- chunk budgets


@pytest.mark.parametrize("top", [128, 512, 1024, 8192])
def test_the_best_chunk_budget_is_found(top: int) -> None:
    class Hill(Arithmetic):
        def capacity(self, candidate: Candidate) -> float:
            return 8.0 / (1 + abs(candidate.chunk_budget.bit_length() - top.bit_length()))

    load = LoadShape(1000, 1000, 100)
    result = search_budgets(2, worker(1000, 1000), load, 0.0, Hill(load).run)
    assert best(result).candidate.name == f"2C {top}"


def test_the_higher_of_two_hills_is_found() -> None:
    """Small steps keep the limit of gaps; large ones exceed it seldom."""

    class Hills(Arithmetic):
        def capacity(self, candidate: Candidate) -> float:
            return {128: 3.0, 256: 9.0, 512: 1.0}.get(candidate.chunk_budget, candidate.chunk_budget / 1024)

    load = LoadShape(1000, 1000, 100)
    assert best(search_budgets(1, worker(1000, 1000), load, 0.0, Hills(load).run)).candidate.name == "1C 256"
