"""`make sim`: a run that breaks an invariant is told with the command that replays it."""

from __future__ import annotations

from functools import partial

import pytest

from tests.sim import many
from tests.sim.bugs import BUGS
from tests.sim.world import run_seed


def test_a_failing_run_names_its_replay_and_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "run_seed", partial(run_seed, planted=BUGS["leak_on_cancel"].planted))
    runs = many.run_chunk(range(45, 51))
    assert runs.num_runs == 6
    assert any("--seed 49" in failure and "references differ" in failure for failure in runs.failures)


def test_processes_share_the_runs() -> None:
    runs = many.Runs()
    for part in many.run_all(range(60), num_jobs=2):
        runs.add(part)
    assert (runs.num_runs, runs.failures) == (60, [])
