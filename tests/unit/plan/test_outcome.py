"""Figures of a simulation against those of bench/statistics.py on the same requests, and histograms against sorted values."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import pytest

from pd_serve.bench.records import RequestRecord
from pd_serve.bench.statistics import Slo, attains, goodput, load_figures, percentile
from pd_serve.plan.histogram import LEAST, Histogram
from pd_serve.plan.outcome import Outcome, OutcomeReport, Served


@pytest.mark.parametrize("count", [1, 2, 60, 5000])
def test_quantiles_are_within_one_percent(count: int) -> None:
    values = np.random.default_rng(count).lognormal(-3, 1.5, count).tolist()
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for q in (0, 1, 50, 90, 99, 99.9, 100):
        assert histogram.percentile(q) == pytest.approx(percentile(values, q), rel=0.01)
    assert histogram.summary().max == max(values)
    assert histogram.summary().mean == pytest.approx(sum(values) / count)


def test_a_value_counts_as_often_as_it_is_added() -> None:
    histogram = Histogram()
    histogram.add(0.010, 98)
    histogram.add(0.500, 2)
    histogram.add(9.0, 0)
    assert histogram.count == 100
    assert histogram.percentile(50) == pytest.approx(0.010, rel=0.01)
    assert histogram.percentile(99) == pytest.approx(0.500, rel=0.01)
    assert histogram.share_up_to(0.1) == 0.98
    assert list(histogram.curve())[1] == (pytest.approx(0.5, rel=0.01), 0.02)


def test_the_ends_of_the_scale_hold() -> None:
    histogram = Histogram()
    assert histogram.percentile(50) == 0.0
    histogram.add(0.0)
    histogram.add(LEAST / 10)
    histogram.add(1e9)
    assert histogram.percentile(0) == 0.0
    assert histogram.percentile(100) == 1e9


def test_memory_does_not_grow() -> None:
    histogram = Histogram()
    before = sys.getsizeof(histogram._counts)
    for value in np.random.default_rng(1).exponential(size=2000).tolist():
        histogram.add(value)
    assert sys.getsizeof(histogram._counts) == before


SLO = Slo(ttft_s=0.5, itl_s=0.08)


def records(count: int) -> list[RequestRecord]:
    generator = np.random.default_rng(3)
    found = []
    for index in range(count):
        first = 0.2 * index + generator.exponential(0.2)
        token_s = (first, *(first + np.cumsum(generator.gamma(4, 0.008, 40))).tolist())
        found.append(RequestRecord(index, "request", 0.2 * index, 0.2 * index, token_s, 100, 41, 200, "", "length", 16 * (index % 3)))
    return found


def simulated(found: list[RequestRecord], slo: Slo) -> Outcome:
    outcome = Outcome(slo, num_gpus=2)
    for record in found:
        gaps = np.diff(record.token_s).tolist()
        for gap in gaps:
            outcome.add_gaps(gap, 1)
        times = record.token_s[0] - record.sent_s, record.token_s[-1] - record.sent_s
        num_late = sum(gap > slo.itl_s for gap in gaps)
        outcome.add_request(Served(record.sent_s, *times, record.num_prompt_tokens, record.num_cached_tokens, 41, num_late))
    return outcome


def test_figures_are_those_of_a_measurement() -> None:
    found = records(200)
    figures, expected = simulated(found, SLO).figures(), load_figures(found).figures()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, rel=0.01), name


def test_attainment_and_goodput_are_those_of_a_measurement() -> None:
    found = records(200)
    outcome, expected = simulated(found, SLO), goodput(found, SLO)
    assert 0 < outcome.num_met < 200
    assert outcome.num_met == sum(attains(record, SLO) for record in found)
    assert outcome.attainment == expected.attainment
    assert outcome.goodput_requests_per_s == pytest.approx(expected.requests_per_s)


def test_goodput_counts_only_where_its_share_kept_the_limits() -> None:
    outcome = Outcome(Slo(ttft_s=1.0))
    for index in range(100):
        outcome.add_request(Served(float(index), 2.0 if index < 5 else 0.5, 3.0, 10, 0, 2))
    assert outcome.attainment == 0.95
    assert outcome.goodput(0.90) == pytest.approx(95 / 102)
    assert outcome.goodput(0.99) == 0.0


def test_rejected_and_failed_requests_count_as_sent() -> None:
    outcome = Outcome(Slo(ttft_s=1.0))
    outcome.add_request(Served(0.0, 0.5, 1.0, 10, 5, 3))
    outcome.rejected("queue_full", 2.0)
    outcome.rejected("predicted_ttft", 3.0)
    outcome.failed(4.0)
    assert (outcome.num_requests, outcome.num_rejected, outcome.attainment, outcome.duration_s) == (4, 2, 0.25, 4.0)
    assert outcome.hit_rate == 0.5


def test_use_adds_up_by_role() -> None:
    outcome = Outcome()
    outcome.add_use("prefill", 3.0, 10.0)
    outcome.add_use("prefill", 1.0, 10.0)
    assert outcome.utilization("prefill") == 0.2
    assert outcome.utilization("decode") == 0.0


def test_an_outcome_as_json() -> None:
    outcome = simulated(records(20), SLO)
    outcome.rejected("queue_full", 1.0)
    outcome.add_use("decode", 1.0, 4.0)
    report = msgspec.json.decode(outcome.to_json(), type=OutcomeReport)
    assert report.rejected == {"queue_full": 1}
    assert report.figures == outcome.figures()
    assert report.figures["utilization_share.decode"] == 0.25


def test_an_outcome_of_nothing_has_figures() -> None:
    assert Outcome().figures()["requests_per_s"] == 0.0
