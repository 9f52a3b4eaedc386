"""Every figure, on records whose figures can be told by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pd_serve.bench import statistics
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.statistics import Slo


def record(sent_s: float, *token_s: float, index: int = 0, planned_s: float = 0.0, error: str = "", status: int = 200) -> RequestRecord:
    return RequestRecord(index, "request", planned_s, sent_s, token_s, 10, len(token_s), status, error, "" if error else "length")


EVEN = record(1.0, 1.5, 1.6, 1.7, 1.8)
SLOW = record(2.0, 4.0, 4.5, 5.0)
LOST = record(3.0, 3.1, error="cut", status=503)


@pytest.mark.parametrize(("q", "value"), [(0, 1.0), (50, 2.5), (75, 3.25), (90, 3.7), (100, 4.0)])
def test_percentile_is_linear_between_the_nearest_ranks(q: float, value: float) -> None:
    assert statistics.percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(value)


def test_percentile_is_numpys() -> None:
    values = np.random.default_rng(7).exponential(size=257).tolist()
    for q in (0.1, 50, 90, 99, 99.9):
        assert statistics.percentile(values, q) == pytest.approx(float(np.percentile(values, q)))


def test_percentile_of_one_and_of_none() -> None:
    assert statistics.percentile([3.0], 99.9) == 3.0
    assert statistics.percentile([], 50) == 0.0


def test_a_summary_has_every_statistic() -> None:
    summary = statistics.summarize(float(value) for value in range(1, 1002))
    assert msgspec.structs.astuple(summary) == (1001, 501.0, 501.0, 901.0, 991.0, 1000.0, 1001.0)
    assert statistics.summarize([]).figures("x") == {}


def test_times_are_counted_from_the_sending() -> None:
    assert statistics.ttft([EVEN, SLOW, LOST]) == pytest.approx([0.5, 2.0])
    assert statistics.e2e([EVEN, SLOW]) == pytest.approx([0.8, 3.0])
    assert statistics.itl([EVEN, SLOW]) == pytest.approx([0.1, 0.1, 0.1, 0.5, 0.5])
    assert statistics.tpot([EVEN, SLOW, record(0.0, 1.0)]) == pytest.approx([0.1, 0.5])


def test_a_load_is_summed_up_with_what_failed() -> None:
    figures = statistics.load_figures([EVEN, SLOW, LOST])
    assert (figures.num_requests, figures.num_failed, figures.num_rejected) == (3, 1, 1)
    assert figures.duration_s == pytest.approx(4.0)
    assert figures.requests_per_s == pytest.approx(0.5)
    assert figures.output_tokens_per_s == pytest.approx(8 / 4)
    assert figures.hit_rate is None
    assert figures.figures()["ttft_s.max"] == pytest.approx(2.0)


def test_hit_rate_is_by_tokens() -> None:
    cached = msgspec.structs.replace(EVEN, num_cached_tokens=8)
    fresh = msgspec.structs.replace(SLOW, num_cached_tokens=0, num_prompt_tokens=30)
    assert statistics.load_figures([cached, fresh]).hit_rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [(Slo(), 2), (Slo(ttft_s=0.6), 1), (Slo(tpot_s=0.2), 1), (Slo(itl_s=0.2), 1), (Slo(itl_s=0.5, ttft_s=2.0), 2), (Slo(ttft_s=0.1), 0)],
)
def test_goodput_counts_whole_requests_within_every_limit(slo: Slo, num_good: int) -> None:
    good = statistics.goodput([EVEN, SLOW, LOST], slo)
    assert good.attainment == pytest.approx(num_good / 3)
    assert good.requests_per_s == pytest.approx(num_good / 4)


def test_an_itl_limit_allows_one_gap_in_a_hundred() -> None:
    steady = [0.1 * count for count in range(101)]
    assert statistics.attains(record(0.0, *steady, 10.9), Slo(itl_s=0.2))
    assert not statistics.attains(record(0.0, *steady, 10.9, 11.8), Slo(itl_s=0.2))


def test_the_rate_of_an_attainment_ends_at_the_first_miss() -> None:
    points = [(4.0, 0.95), (1.0, 1.0), (2.0, 0.89), (8.0, 0.2)]
    assert statistics.rate_at_attainment(points, 0.9) == 1.0
    assert statistics.rate_at_attainment(points, 0.8) == 4.0
    assert statistics.rate_at_attainment([(1.0, 0.5)], 0.9) == 0.0


def test_offered_load_tells_how_late_it_was() -> None:
    late = [record(0.0, 1.0), record(1.5, 2.0, planned_s=1.0), record(3.0, 4.0, planned_s=2.0)]
    offered = statistics.offered(late)
    assert offered.planned_rate == pytest.approx(1.0)
    assert offered.achieved_rate == pytest.approx(2 / 3)
    assert offered.late.max == pytest.approx(1.0)
    assert offered.late.p50 == pytest.approx(0.5)


def test_the_time_between_rounds_offers_nothing() -> None:
    first = [record(0.0, 1.0), record(1.0, 2.0, planned_s=1.0)]
    second = [record(50.0, 51.0, planned_s=50.0), record(52.0, 53.0, planned_s=52.0)]
    offered = statistics.offered(first, second)
    assert offered.planned_rate == pytest.approx(2 / 3)
    assert offered.achieved_rate == pytest.approx(2 / 3)
