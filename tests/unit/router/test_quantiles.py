"""Quantiles without keeping what was seen, against numpy over all of it."""

from __future__ import annotations

import random

import numpy
import pytest

from router.quantiles import FEW, WINDOW, Lengths, LengthsByTenant, Quantile

_STREAMS = {
    "uniform": lambda rng: rng.uniform(0, 100),
    "exponential": lambda rng: rng.expovariate(0.02),
    "lognormal": lambda rng: rng.lognormvariate(4, 1),
    "two humps": lambda rng: rng.gauss(20, 3) if rng.random() < 0.7 else rng.gauss(400, 30),
    "whole numbers": lambda rng: float(rng.randrange(1, 64)),
}


@pytest.mark.parametrize("name", _STREAMS)
@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_quantiles_are_near_those_of_all_numbers(name: str, p: float) -> None:
    """Near: the share of numbers below it is within 3 % of `p`."""
    for seed in range(3):
        rng = random.Random(seed)
        numbers = [_STREAMS[name](rng) for _ in range(2000)]
        quantile = Quantile(p)
        for number in numbers:
            quantile.add(number)
        low, high = numpy.quantile(numbers, (max(0.0, p - 0.03), min(1.0, p + 0.03)))
        assert low - 1 <= quantile.value() <= high + 1, (seed, quantile.value(), numpy.quantile(numbers, p))


def test_the_paper_s_own_example() -> None:
    """Table I of the paper: twenty observations, and the median's estimate after them."""
    numbers = (
        0.02,
        0.15,
        0.74,
        3.39,
        0.83,
        22.37,
        10.15,
        15.43,
        38.62,
        15.92,
        34.60,
        10.28,
        1.47,
        0.40,
        0.05,
        11.39,
        0.27,
        0.42,
        0.09,
        11.37,
    )
    median = Quantile(0.5)
    for number in numbers:
        median.add(number)
    assert median.value() == pytest.approx(4.44, abs=0.01)


def test_few_numbers_are_exact_and_none_is_zero() -> None:
    median = Quantile(0.5)
    assert median.value() == 0.0
    for number, expected in ((7.0, 7.0), (1.0, 7.0), (3.0, 3.0)):
        median.add(number)
        assert median.value() == expected


def test_what_was_learned_is_forgotten_when_traffic_changes() -> None:
    lengths = Lengths()
    for _ in range(3 * WINDOW):
        lengths.add(10)
    assert (lengths.mean(), lengths.levels()) == (10.0, (10.0, 10.0, 10.0))
    for _ in range(2 * WINDOW):
        lengths.add(100)
    assert (lengths.mean(), lengths.levels()) == (100.0, (100.0, 100.0, 100.0))


def test_a_tenant_with_few_answers_is_taken_to_be_like_all() -> None:
    lengths = LengthsByTenant()
    for _ in range(50):
        lengths.add("long", 200)
    for number in range(FEW):
        assert lengths.of("short").mean() > 100, number
        lengths.add("short", 5)
    assert lengths.of("short").mean() == 5
    assert lengths.of("long").mean() == 200
    assert lengths.of("unknown").mean() > 100
