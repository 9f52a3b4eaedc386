"""Two workers that die in the same moment, of one kind or of both, cost no answer either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import campaign, draw_pairs


def test_pairs_are_drawn_from_the_seed_and_are_of_every_kind() -> None:
    kills = draw_pairs(5, 10)
    assert kills == draw_pairs(5, 10) != draw_pairs(6, 10)
    assert {(kill.role, kill.also[0]) for kill in kills[:5] if kill.also} == {
        ("prefill", "decode"),
        ("decode", "decode"),
        ("prefill", "prefill"),
    }
    assert all(kill.also and (kill.role, kill.index) != kill.also for kill in kills)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_deaths_of_two_workers_at_once_cost_no_answer(tmp_path: Path) -> None:
    report = campaign(tmp_path, seed=20, num_kills=10, in_pairs=True)
    print(report)
    assert report.num_kills == 10
    assert report.moves["peer_lost"] > 5
