"""Plans: the same from the same seed, independent draws, files that give them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.workload import Arrivals, LengthRange, Workload, arrival_times, make_plans, read_length_pairs, read_plans, write_plans

WORKLOAD = Workload(20, LengthRange(5, 40), LengthRange(1, 9), rate=4.0, seed=3)


def test_the_same_seed_gives_the_same_plans_and_another_others() -> None:
    assert make_plans(WORKLOAD) == make_plans(WORKLOAD)
    assert make_plans(WORKLOAD) != make_plans(replace(WORKLOAD, seed=4))


def test_another_rate_leaves_lengths_and_prompts_as_they_were() -> None:
    faster = make_plans(replace(WORKLOAD, rate=400.0))
    for plan, other in zip(make_plans(WORKLOAD), faster, strict=True):
        assert (plan.prompt, plan.max_tokens) == (other.prompt, other.max_tokens)


def test_more_requests_begin_with_the_same_ones() -> None:
    assert make_plans(replace(WORKLOAD, num_requests=30))[:20] == make_plans(WORKLOAD)


def test_lengths_lie_in_their_ranges_and_prompts_share_nothing() -> None:
    plans = make_plans(WORKLOAD)
    assert {len(plan.prompt) for plan in plans} <= set(range(5, 41))
    assert {plan.max_tokens for plan in plans} <= set(range(1, 10))
    assert len({plan.prompt[:3] for plan in plans}) == 20


def test_prefixes_are_shared_in_turn() -> None:
    plans = make_plans(replace(WORKLOAD, prefix_tokens=4, num_prefixes=2))
    assert plans[0].prompt[:4] == plans[2].prompt[:4] != plans[1].prompt[:4]
    assert plans[0].prompt[4:] != plans[2].prompt[4:]


def test_pairs_replace_the_ranges() -> None:
    plans = make_plans(replace(WORKLOAD, num_requests=3, pairs=((7, 2), (9, 1))))
    assert [(len(plan.prompt), plan.max_tokens) for plan in plans] == [(7, 2), (9, 1), (7, 2)]


def test_constant_arrivals_are_even_and_poisson_ones_have_the_rate() -> None:
    assert arrival_times(4, 2.0, Arrivals.CONSTANT, 0) == [0.0, 0.5, 1.0, 1.5]
    times = arrival_times(4001, 10.0, Arrivals.POISSON, 1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.05)


def test_without_a_rate_all_are_at_the_start() -> None:
    assert {plan.at_s for plan in make_plans(replace(WORKLOAD, rate=0.0))} == {0.0}


def test_a_file_gives_the_plans_back(tmp_path: Path) -> None:
    plans = make_plans(WORKLOAD)
    write_plans(tmp_path / "sub" / "plans.jsonl", plans)
    assert read_plans(tmp_path / "sub" / "plans.jsonl") == plans


def test_a_broken_file_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    write_plans(path, make_plans(WORKLOAD)[:2])
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(BenchError, match=r"plans\.jsonl:3"):
        read_plans(path)
    with pytest.raises(BenchError, match="cannot read"):
        read_plans(tmp_path / "none")


def test_length_pairs_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text("# prompt output\n512, 16\n\n8 4  # short\n")
    assert read_length_pairs(path) == ((512, 16), (8, 4))
    path.write_text("512\n")
    with pytest.raises(BenchError, match="lengths:1"):
        read_length_pairs(path)


@pytest.mark.parametrize("text", ["", "x", "0", "9-3", "1-", "-4"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(BenchError):
        LengthRange.parse(text)
