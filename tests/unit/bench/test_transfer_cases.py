"""What is written covers the same bytes whatever order it is in, and a pass covers other bytes than the one before."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.bench.transfer_cases import Case, KVCase, PoolState, RunsCase, layout_of, num_bytes, plan_passes, size_text

LAYOUT = layout_of("3x2x8x4", 64)


def bytes_of(case: Case, column: int) -> list[set[int]]:
    """[pass] -> every byte of one side; a byte that is written twice fails."""
    found = []
    for batches in plan_passes(case):
        covered: list[int] = []
        for ops in batches:
            for row in ops.tolist():
                covered += range(row[column], row[column] + row[2])
        assert len(covered) == len(set(covered)) == num_bytes(batches)
        found.append(set(covered))
    return found


@given(st.integers(1, 16), st.integers(0, 5))
def test_a_pool_written_in_runs_of_any_length_is_written_once(run_length: int, seed: int) -> None:
    case = RunsCase(unit_nbytes=4, run_length=run_length, pass_nbytes=64, pool_nbytes=256, seed=seed)
    for column in (0, 1):
        passes = bytes_of(case, column)
        assert sum(map(len, passes)) == len(set.union(*passes))
        assert max(set.union(*passes)) < 256
        assert {len(covered) for covered in passes} == {64 // (4 * run_length) * 4 * run_length}


def test_a_run_is_one_write_however_many_units_it_has() -> None:
    (ops,) = plan_passes(RunsCase(4, 16, 64, 256))[0]
    assert ops[:, 2].tolist() == [64]


def test_runs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        plan_passes(RunsCase(4, 32, 64, 256))


@pytest.mark.parametrize("state", PoolState)
def test_kv_of_a_prompt_is_moved_whole_in_any_state_of_the_pool(state: PoolState) -> None:
    case = KVCase(LAYOUT, num_tokens=30, state=state)
    passes = bytes_of(case, 1)
    assert {len(covered) for covered in passes} == {30 * LAYOUT.bytes_per_token}
    assert sum(map(len, passes)) == len(set.union(*passes))
    assert max(set.union(*passes)) < LAYOUT.pool_nbytes


def test_layers_go_one_by_one_and_a_fresh_pool_needs_one_write_for_each() -> None:
    batches = plan_passes(KVCase(LAYOUT, 32, PoolState.FRESH))[0]
    assert [len(ops) for ops in batches] == [1] * LAYOUT.num_layers


def test_an_isolated_pool_needs_a_write_for_every_block() -> None:
    batches = plan_passes(KVCase(LAYOUT, 32, PoolState.ISOLATED))[0]
    assert [len(ops) for ops in batches] == [LAYOUT.num_blocks_for(32)] * LAYOUT.num_layers
    assert {int(nbytes) for ops in batches for nbytes in ops[:, 2]} == {LAYOUT.block_nbytes}


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    case = KVCase(LAYOUT, 32, PoolState.HALF, seed=3)
    first, again = (np.concatenate(plan_passes(case)[0]) for _ in range(2))
    other = np.concatenate(plan_passes(msgspec.structs.replace(case, seed=4))[0])
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("text", ["", "30x3x64", "30x3x64x0", "axbxcxd", "1x2x3x4x5"])
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout"):
        layout_of(text, 4)


def test_sizes_are_named_in_the_largest_unit_that_divides_them() -> None:
    assert [size_text(nbytes) for nbytes in (12, 4096, 6144, 1 << 20, 3 << 30)] == ["12 B", "4 KiB", "6 KiB", "1 MiB", "3 GiB"]
