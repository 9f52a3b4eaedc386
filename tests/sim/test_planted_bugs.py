"""The simulator must find every planted mistake within a few hundred runs, and say what it is."""

from __future__ import annotations

import re

import pytest

from tests.sim.bugs import BUGS, Bug
from tests.sim.core import ViolationError
from tests.sim.world import run_seed

_MOST_RUNS = 600


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    for seed in range(bug.near, bug.near + _MOST_RUNS):
        error = _violation(seed, bug)
        if error is not None:
            assert re.search(bug.symptom, str(error)), f"seed {seed}: {error}"
            assert any(f"--seed {seed}" in note for note in error.__notes__)
            return
    pytest.fail(f"{name} was not found in {_MOST_RUNS} runs from seed {bug.near}")


def _violation(seed: int, bug: Bug) -> ViolationError | None:
    try:
        run_seed(seed, bug.planted)
    except ViolationError as error:
        return error
    return None
