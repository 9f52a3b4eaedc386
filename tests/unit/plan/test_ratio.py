"""How many of each: the arithmetic beyond the published figures, which test_oracle.py asserts."""

from __future__ import annotations

import pytest

from pd_serve.plan.errors import PlanError
from pd_serve.plan.ratio import Demand, Supply, best_split, need, ratio

DEMAND = Demand(2000, 300)
SUPPLY = Supply(20_000, 3000)


def test_instances_are_rounded_up_and_never_none() -> None:
    found = need(31, DEMAND, SUPPLY)
    assert (found.num_prefill, found.num_decode) == (4, 4)
    assert found.exact_prefill == pytest.approx(3.1)
    tiny = need(0.001, DEMAND, SUPPLY)
    assert (tiny.num_prefill, tiny.num_decode) == (1, 1)


def test_a_product_that_floats_round_up_is_not_another_instance() -> None:
    assert 0.1 * 3 > 0.3
    assert need(0.1 * 3, Demand(1, 1), Supply(0.1, 0.1)).num_prefill == 3


def test_head_room_asks_for_more_and_sustains_less() -> None:
    found = need(30, DEMAND, SUPPLY, utilisation=0.8)
    assert (found.num_prefill, found.num_decode) == (4, 4)
    assert found.exact_decode == pytest.approx(3.75)
    assert found.sustained_requests_per_s == pytest.approx(32)


def test_tokens_that_caches_have_are_not_computed() -> None:
    cached = Demand(2000, 300, hit_rate=0.5)
    assert ratio(cached, SUPPLY) == pytest.approx(ratio(DEMAND, SUPPLY) / 2)
    assert need(30, cached, SUPPLY).num_prefill == 2


def test_gpus_are_counted_by_instance() -> None:
    assert need(30, DEMAND, Supply(20_000, 3000, gpus_per_prefill=4, gpus_per_decode=8)).num_gpus == 3 * 4 + 3 * 8


def test_a_split_is_the_one_that_sustains_most() -> None:
    demand, supply = Demand(1000, 8000), Supply(4000, 500)
    split = best_split(16, demand, supply)
    assert (split.num_prefill, split.num_decode) == (1, 15)
    assert split.sustained_requests_per_s == pytest.approx(15 * 500 / 8000)
    assert (split.busy_prefill, split.busy_decode) == (pytest.approx(15 / 64), pytest.approx(1))
    even = best_split(6, DEMAND, SUPPLY)
    assert (even.num_prefill, even.num_decode) == (3, 3)


def test_no_split_sustains_more_than_the_best_one() -> None:
    supply = Supply(9000, 700, gpus_per_prefill=2, gpus_per_decode=3)
    best = best_split(31, DEMAND, supply)
    others = [min(p * 9000 / 2000, d * 700 / 300) for p in range(1, 16) for d in range(1, 11) if 2 * p + 3 * d <= 31]
    assert best.sustained_requests_per_s == pytest.approx(max(others))
    assert best.num_gpus == 2 * best.num_prefill + 3 * best.num_decode <= 31


@pytest.mark.parametrize(
    ("demand", "supply", "words"),
    [
        (Demand(0, 300), SUPPLY, "prompt tokens: 0"),
        (Demand(2000, 300, hit_rate=1.0), SUPPLY, "hit rate of 1"),
        (DEMAND, Supply(0, 3000), "prefill tokens/s: 0"),
        (DEMAND, Supply(20_000, float("nan")), "decode tokens/s: nan"),
    ],
)
def test_what_cannot_be_is_named(demand: Demand, supply: Supply, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        need(30, demand, supply)


def test_a_pool_too_small_for_both_kinds_is_refused() -> None:
    with pytest.raises(PlanError, match="1 GPUs are too few"):
        best_split(1, DEMAND, SUPPLY)
    with pytest.raises(PlanError, match="utilisation of 0"):
        need(30, DEMAND, SUPPLY, utilisation=0)
    with pytest.raises(PlanError, match="rate of -1"):
        need(-1, DEMAND, SUPPLY)
