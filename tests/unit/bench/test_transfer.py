"""Ratios and verdicts of `bench transfer`, from seconds that were made up."""

from __future__ import annotations

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.perftest import parse_bandwidth
from pd_serve.bench.transfer import Outcome, TransferOptions, cases_of, num_cases, paired_ratio, targets_of
from pd_serve.bench.transfer_cases import KVCase, PoolState, RunsCase, layout_of
from pd_serve.bench.transfer_node import Measured, Took

CSV = """iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
2000,0.376,438.391,438.391,142.57,150.50,2281,2281
"""


def outcome(lane: str, case: RunsCase | KVCase, written_s: float, perftest: float = 0.0) -> Outcome:
    measured = Measured(1000, 10, (Took(written_s, written_s / 2),) * 3, (Took(0.9, 0.9),) * 3, (Took(0.8, 0.4),) * 3)
    return Outcome(lane, case, "", measured, perftest)


def test_a_ratio_is_of_neighbours_in_time_not_of_two_medians() -> None:
    # The machine was half as fast in every second round; ours took as long as theirs in each.
    assert paired_ratio([1.0, 2.0, 1.0, 2.0], [1.0, 2.0, 1.0, 2.0]) == 1.0
    assert paired_ratio([1.0, 3.0, 5.0], [2.0, 2.0, 2.0]) == 1.5


def test_figures_are_rates_of_the_median_round() -> None:
    figures = outcome("shm", RunsCase(4096, 16, 1 << 20, 1 << 22), 1.6).figures()
    assert figures["bytes_per_s"] == 625.0
    assert figures["memcpy_bytes_per_s"] == 1250.0
    assert figures["of_memcpy_ratio"] == 0.5
    assert figures["of_memcpy_same_ranges_ratio"] == pytest.approx(0.5625)
    assert figures["of_memcpy_cpu_ratio"] == 0.5
    assert "of_perftest_ratio" not in figures


def test_each_target_is_asked_of_the_case_that_it_is_for() -> None:
    layout = layout_of("2x2x8x4", 64)
    runs = [RunsCase(4096, run_length, 64 << 20, 256 << 20) for run_length in (1, 16, 256)]
    outcomes = [outcome("shm", case, 1.0) for case in runs]
    outcomes += [outcome("shm", KVCase(layout, 32, state), 1.0) for state in PoolState]
    outcomes += [outcome("tcp", runs[1], 1.0, perftest=1200.0)]
    targets = targets_of(outcomes)
    assert [(target.least, target.is_met) for target in targets] == [
        (0.75, True),
        (0.9, True),
        (0.7, True),
        (0.5, True),
        (0.5, True),
        (0.9, False),
    ]
    assert targets[1].words() == "met: shm: 1 MiB (runs of 256), of memcpy of the same ranges: 0.90 (at least 0.9)"


def test_cases_are_counted_for_every_lane_and_layout() -> None:
    options = TransferOptions(lanes=("shm", "tcp"), layouts=("2x2x8x4", "1x1x8x8"), num_tokens=32)
    assert num_cases(options) == 2 * len(cases_of(options)) == 2 * (8 + 2 * len(PoolState))
    with pytest.raises(BenchError, match="layout"):
        cases_of(TransferOptions(layouts=("small",)))


def test_perftest_tells_its_bandwidth_in_mib_per_second() -> None:
    assert parse_bandwidth(CSV) == 150.5 * 2**20


@pytest.mark.parametrize("output", ["", "Failed to connect", CSV.splitlines()[0]])
def test_a_perftest_that_measured_nothing_is_an_error(output: str) -> None:
    with pytest.raises(BenchError, match="bandwidth"):
        parse_bandwidth(output)
