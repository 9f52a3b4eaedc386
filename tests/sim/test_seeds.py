"""A few thousand simulated clusters. `python -m tests.sim --seeds N --start S` runs more, `--seed K` replays one."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.sim.world import run_seed

_CHUNK = 50
_NUM_SEEDS = 1000


@cache
def counts_of(seed: int) -> Counter[str]:
    return run_seed(seed).counts


@pytest.mark.parametrize(
    "first", [*range(0, _NUM_SEEDS, _CHUNK), *(pytest.param(first, marks=pytest.mark.slow) for first in range(_NUM_SEEDS, 3000, _CHUNK))]
)
def test_no_invariant_breaks(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + _CHUNK):
        totals.update(counts_of(seed))
    assert totals["failed"] == 0
    assert totals["finished"] > _CHUNK
    assert totals["moves"] > 0


def test_workers_of_any_two_roles_die_at_once() -> None:
    totals: Counter[str] = Counter()
    for seed in range(300):
        totals.update(counts_of(seed))
    pairs = {name: count for name, count in totals.items() if name.startswith("crash of ")}
    assert pairs.keys() >= {"crash of decode and prefill", "crash of decode and decode", "crash of prefill and prefill"}, pairs
    assert totals["handover timeouts"] > 0


def test_a_seed_always_runs_the_same_way() -> None:
    first, second = run_seed(7), run_seed(7)
    assert (first.virtual_s, first.num_events, first.counts) == (second.virtual_s, second.num_events, second.counts)
