from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.kv.free_runs import FreeRuns


@settings(max_examples=80, deadline=None)
@given(rng=st.randoms(use_true_random=False), num_blocks=st.integers(0, 40))
def test_takes_and_puts_like_a_set_and_merges_neighbours(rng: random.Random, num_blocks: int) -> None:
    runs, model = FreeRuns(num_blocks), set(range(num_blocks))
    out: list[int] = []
    for _ in range(60):
        if out and rng.random() < 0.5:
            back = [out.pop(rng.randrange(len(out))) for _ in range(rng.randint(1, len(out)))]
            runs.put(back)
            model |= set(back)
        else:
            count = rng.randint(0, len(model))
            taken = runs.take(count, after=rng.choice(out) if out else None)
            assert len(taken) == len(set(taken)) == count
            assert set(taken) <= model
            model -= set(taken)
            out += taken
        assert runs.blocks() == sorted(model)
        assert len(runs) == len(model)
        assert runs.num_runs == sum(1 for block in model if block - 1 not in model)


def test_scattered_rest_comes_from_the_longest_runs() -> None:
    runs = FreeRuns(12)
    runs.take(12)
    runs.put([0, 1, 2, 4, 6, 7, 9, 10, 11])
    taken = runs.take(6)
    assert sorted(taken) == [0, 1, 2, 9, 10, 11]


def test_block_put_twice_is_caught() -> None:
    runs = FreeRuns(4)
    with pytest.raises(AssertionError):
        runs.put([2])
