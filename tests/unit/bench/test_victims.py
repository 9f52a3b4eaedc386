"""The victims test: which gaps count, what is told of them, and which chunk budget is the best."""

from __future__ import annotations

import pytest

from pd_serve.bench.records import RequestRecord
from pd_serve.bench.victims import (
    LONG,
    VICTIM,
    Round,
    VictimsTest,
    Window,
    beside_baseline,
    best_budget,
    by_slot,
    gaps_within,
    make_test,
    pooled,
)

TEST = VictimsTest(slots=4, victim_tokens=256, long_tokens=64, count=3, interval_s=2.5, lead_s=2.0)


def record(tokens: tuple[float, ...], kind: str = VICTIM, sent_s: float = 0.0, error: str = "") -> RequestRecord:
    return RequestRecord(0, kind, 0.0, sent_s, tokens, 4, len(tokens), 200, error, "length")


def test_only_gaps_between_tokens_that_both_came_inside_the_window_count() -> None:
    window = Window(2.0, 5.0)
    found = gaps_within(record((0.5, 1.9, 2.5, 2.75, 4.75, 5.5, 9.0)), window)
    assert found == [(2.75, 0.25), (4.75, 2.0)]


def test_a_gap_over_the_edge_would_be_found_without_the_cut() -> None:
    """The planted mistake: no cut."""
    assert len(gaps_within(record((0.5, 1.9, 2.5)), Window(0.0, 9.0))) == 2
    assert gaps_within(record((0.5, 1.9, 2.5)), Window(2.0, 9.0)) == []


def test_no_gap_spans_two_requests_of_a_slot() -> None:
    one = Round((record((2.0, 2.5)), record((4.0, 4.25))), Window(2.0, 5.0))
    assert sorted(length for _, length in one.gaps) == [0.25, 0.5]
    assert one.num_tokens == 4


def test_long_prompts_come_at_a_constant_rate_after_the_lead_and_the_end_is_an_interval_after_the_last() -> None:
    longs = [plan for plan in make_test(TEST) if plan.kind == LONG]
    assert [plan.at_s for plan in longs] == [2.0, 4.5, 7.0]
    assert TEST.end_s == 9.5
    assert {len(plan.prompt) for plan in longs} == {64}


def test_slots_begin_with_requests_of_different_lengths_and_never_run_out_of_them() -> None:
    slots = by_slot(make_test(TEST))
    assert [slot[0].max_tokens for slot in slots] == [64, 128, 192, 256]
    assert all(plan.max_tokens == 256 for slot in slots for plan in slot[1:])
    fastest_s = 0.003
    assert all(sum(plan.max_tokens for plan in slot) * fastest_s > TEST.end_s for slot in slots)


def test_the_same_test_is_the_same_requests_and_no_two_prompts_are_alike() -> None:
    plans = make_test(TEST)
    assert plans == make_test(TEST)
    assert len({plan.prompt for plan in plans}) == len(plans)


def test_rounds_are_pooled_and_only_victims_sent_inside_the_window_have_a_ttft() -> None:
    window = Window(1.0, 3.0)
    rounds = [
        Round((record((1.0, 1.5), sent_s=0.5), record((2.5, 2.75), sent_s=2.0), record((4.0,), LONG, 1.0)), window),
        Round((record((1.5, 2.5), sent_s=1.0), record((3.0,), LONG, 1.0)), window),
    ]
    figures = pooled(rounds)
    assert figures["victim_tokens_per_s"] == 6 / 4
    assert (figures["itl_s.p50"], figures["itl_s.max"]) == (0.5, 1.0)
    assert (figures["victim_ttft_s.p50"], figures["victim_ttft_s.max"]) == (0.5, 0.5)
    assert (figures["long_ttft_s.p50"], figures["long_ttft_s.max"]) == (2.5, 3.0)
    assert figures["failed"] == 0


def test_an_arm_is_told_beside_its_baseline() -> None:
    told = beside_baseline({"itl_s.max": 0.03, "victim_tokens_per_s": 180.0}, {"itl_s.max": 0.02, "victim_tokens_per_s": 200.0})
    assert told["baseline_itl_s.max"] == 0.02
    assert told["itl_ratio.max"] == pytest.approx(1.5)
    assert told["victim_tokens_ratio"] == pytest.approx(0.9)


def sweep_row(worst_ms: float, long_s: float, tokens: float) -> dict[str, float]:
    return {"itl_s.p999": worst_ms / 1e3, "long_ttft_s.p50": long_s, "victim_tokens_per_s": tokens}


def test_the_best_budget_has_the_shortest_worst_gap_of_those_that_keep_up() -> None:
    rows = {64: sweep_row(60, 3.0, 170), 128: sweep_row(90, 1.3, 172), 256: sweep_row(170, 1.1, 175), 512: sweep_row(300, 1.0, 150)}
    assert best_budget(rows) == 128, "64 is slow with long prompts"
    assert best_budget({**rows, 64: sweep_row(60, 1.5, 170)}) == 64
    assert best_budget({**rows, 128: sweep_row(90, 1.3, 100)}) == 256, "128 would starve the victims"


def test_a_sweep_of_which_nothing_keeps_up_still_has_a_best() -> None:
    assert best_budget({64: sweep_row(60, 9.0, 180), 512: sweep_row(300, 1.0, 90)}) in (64, 512)
