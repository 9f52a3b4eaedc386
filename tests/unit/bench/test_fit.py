"""Coefficients of known costs are found again, from samples as streams and prompts give them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.fit import DEFAULT_LENGTHS
from pd_serve.bench.fit_samples import CALL_SIZES, PromptSample, StepSample, calls_of, chunks_of, fit_prompts, fit_steps, steps_of
from pd_serve.bench.least_squares import MAX_QUANTILES, fit, quantiles
from pd_serve.bench.plots_fit import fitted_against_measured
from pd_serve.bench.records import RequestRecord
from pd_serve.cli.app import run


def test_exact_values_are_fitted_exactly() -> None:
    rows = [(1.0, n, n * n) for n in (32.0, 128.0, 512.0, 2048.0, 8192.0)]
    found = fit(rows, [0.02 + 1e-4 * n + 3e-9 * square for _, n, square in rows])
    assert found.coefficients == pytest.approx((0.02, 1e-4, 3e-9))
    assert found.r2 == pytest.approx(1.0)
    assert found.worst < 1e-9
    assert found.value((1.0, 100.0, 1e4)) == pytest.approx(0.03003)


def test_no_coefficient_is_negative() -> None:
    rows = [(1.0, n, n * n) for n in (10.0, 100.0, 1000.0)]
    found = fit(rows, [0.01 + 1e-4 * n - 2e-8 * square for _, n, square in rows])
    assert min(found.coefficients) >= 0
    assert found.worst < 0.2


def test_small_times_weigh_as_much_as_large_ones() -> None:
    rows = [(1.0, n) for n in (1.0, 10.0, 1e5)]
    found = fit(rows, [0.01, 0.01, 10.0])
    assert found.value((1.0, 1.0)) == pytest.approx(0.01, rel=0.05)


def test_too_few_cases_and_times_that_are_none_are_told() -> None:
    with pytest.raises(BenchError, match="too few"):
        fit([(1.0, 2.0, 4.0)], [1.0])
    with pytest.raises(BenchError, match="not above 0"):
        fit([(1.0,), (1.0,)], [1.0, 0.0])


def test_quantiles_are_those_of_the_values() -> None:
    assert quantiles([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    many = quantiles(np.random.default_rng(1).normal(1, 0.1, 5000).tolist())
    assert len(many) == MAX_QUANTILES
    assert many[MAX_QUANTILES // 2] == pytest.approx(1.0, abs=0.01)
    assert quantiles([]) == ()


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    assert chunks_of(1200, 64, 512) == [(512, 64), (512, 576), (176, 1088)]


def test_costs_of_prompts_are_found_through_chunks_and_caches() -> None:
    generator = np.random.default_rng(2)
    samples = []
    for num_tokens, num_cached in ((32, 0), (512, 0), (1536, 0), (64, 1024), (700, 512)):
        seconds = sum(0.03 + 2e-4 * n + 5e-8 * n * (n + 2 * p) for n, p in chunks_of(num_tokens, num_cached, 512))
        for _ in range(9):
            samples.append(PromptSample(num_tokens, num_cached, 1.0, seconds * generator.normal(1, 0.02), 0.004))
    times = fit_prompts(samples, 512)
    assert times.fitted.coefficients == pytest.approx((0.03, 2e-4, 5e-8), rel=0.1)
    assert times.noise[len(times.noise) // 2] == pytest.approx(1.0, abs=0.02)
    assert {case for case, _, _ in times.cases} >= {"32 behind 0", "64 behind 1024"}


@pytest.mark.parametrize(
    ("num_tokens", "sizes", "calls", "rows"),
    [(300, (), 1, 300), (0, (), 0, 0), (512, (512, 256, 128, 64), 1, 512), (511, (512, 256, 128, 64), 4, 512), (65, (64,), 2, 128)],
)
def test_rows_go_into_calls_of_certain_sizes(num_tokens: int, sizes: tuple[int, ...], calls: int, rows: int) -> None:
    assert calls_of(num_tokens, sizes) == (calls, rows)


@pytest.mark.parametrize("sizes", CALL_SIZES)
def test_a_staircase_is_told_from_a_plain_cost(sizes: tuple[int, ...]) -> None:
    generator = np.random.default_rng(4)
    samples = []
    for num_tokens in DEFAULT_LENGTHS:
        seconds = 0.0
        for count, cached in chunks_of(num_tokens, 0, 512):
            num_calls, num_rows = calls_of(count, sizes)
            seconds += 0.03 + 0.02 * num_calls * bool(sizes) + 3e-4 * num_rows + 1e-7 * count * (count + 2 * cached)
        samples += [PromptSample(num_tokens, 0, 1.0, seconds * generator.normal(1, 0.01), 0.0) for _ in range(4)]
    times = fit_prompts(samples, 512)
    # Calls of one size cannot be told from rows of it, nor need they be: then any staircase that describes them does.
    assert bool(times.call_sizes) == bool(sizes)
    assert times.fitted.worst < 0.03
    if len(sizes) > 2:
        assert times.call_sizes == sizes
        assert times.fitted.coefficients[3] == pytest.approx(0.02, rel=0.25)


def test_what_is_neither_compute_nor_hand_over_is_the_way_of_the_request() -> None:
    assert PromptSample(10, 0, 0.5, 0.3, 0.05).request_s == pytest.approx(0.15)
    assert PromptSample(10, 0, 0.3, 0.3, 0.05).request_s == 0.0


def staircase(num_prompt: int, outputs: tuple[int, ...]) -> list[RequestRecord]:
    """Streams that begin in one step and end after so many tokens each; step times are those of the coefficients below."""
    token_s: list[list[float]] = [[1.0] for _ in outputs]
    now = 1.0
    for step in range(1, max(outputs)):
        running = [index for index, count in enumerate(outputs) if count > step]
        now += 0.02 + 1e-5 * sum(num_prompt + step for _ in running) + 5e-4 * len(running)
        for place, index in enumerate(running):
            token_s[index].append(now + 1e-4 * place)
    return [
        RequestRecord(i, "stream", 0.0, 0.0, tuple(times), num_prompt, len(times), 200, "", "length") for i, times in enumerate(token_s)
    ]


def test_who_takes_part_in_a_step_is_told_by_the_streams_tokens() -> None:
    samples = steps_of(staircase(100, (3, 6, 6)))
    assert [(sample.batch, sample.context) for sample in samples] == [(3, 303), (3, 306), (2, 206), (2, 208), (2, 210)]


def test_steps_before_all_have_begun_do_not_count() -> None:
    late = RequestRecord(9, "stream", 0.0, 0.0, tuple(1.5 + 0.03 * place for place in range(3)), 100, 3, 200, "", "length")
    early = staircase(100, (60,))
    assert all(sample.step_s < 0.1 for sample in steps_of([*early, late]))
    assert len(steps_of([*early, late])) < len(steps_of(early))


def test_costs_of_steps_are_found_from_streams() -> None:
    outputs = tuple(24 + 12 * sum(index < stair for stair in (8, 4, 2, 1)) for index in range(8))
    samples: list[StepSample] = []
    for num_prompt in (640, 256, 64):
        samples += steps_of(staircase(num_prompt, outputs))
    times = fit_steps(samples)
    assert times.fitted.coefficients == pytest.approx((0.02, 1e-5, 5e-4), rel=0.05)
    assert times.fitted.r2 > 0.99


def test_the_picture_shows_both_costs() -> None:
    series = {"prompts": [("32 behind 0", 0.05, 0.06)], "decode steps": [("1 x 64", 0.02, 0.02), ("8 x 64", 0.03, 0.031)]}
    assert fitted_against_measured(series).startswith(b"\x89PNG")


def test_the_command_has_help_with_an_example_and_refuses_nonsense(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["bench", "fit", "--help"]) == 0
    assert "bench fit --arm ours=1p1d" in capsys.readouterr().out
    assert run(["bench", "fit", "--arm", "a=1p1d", "--arm", "b=1p1d", "--out", str(tmp_path)]) != 0
    assert "one arm" in capsys.readouterr().err
    assert run(["bench", "fit", "--arm", "a=1p1d", "--lengths", "0.5", "--out", str(tmp_path)]) != 0
    assert "--lengths" in capsys.readouterr().err
