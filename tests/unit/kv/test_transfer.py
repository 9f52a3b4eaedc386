"""Plans are checked by carrying them out on byte arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.kv.transfer import plan_ranges, write_ranges


def layout(num_blocks: int, block_size: int = 4, num_layers: int = 3) -> KVLayout:
    return KVLayout(num_layers, 2, 3, block_size, num_blocks, KVDtype.BFLOAT16)


def view(pool: np.ndarray, of: KVLayout) -> np.ndarray:
    """[layers, blocks, 2, block_size, token_nbytes]."""
    return pool.reshape(of.num_layers, of.num_blocks, 2, of.block_size, of.token_nbytes)


@settings(max_examples=100, deadline=None)
@given(rng=st.randoms(use_true_random=False), block_size=st.sampled_from([1, 2, 4, 16]), fragmented=st.booleans())
def test_plan_moves_exactly_the_missing_tokens(rng: random.Random, block_size: int, fragmented: bool) -> None:
    src_layout, dst_layout = layout(rng.randint(6, 12), block_size), layout(rng.randint(6, 12), block_size)
    num_logical = rng.randint(1, 6)
    end = rng.randint(1, num_logical * block_size)
    start = rng.randint(0, end)
    src_blocks = rng.sample(range(src_layout.num_blocks), num_logical) if fragmented else list(range(num_logical))
    dst_blocks = rng.sample(range(dst_layout.num_blocks), num_logical) if fragmented else list(range(num_logical))
    src = np.random.default_rng(rng.randrange(1 << 30)).integers(1, 256, src_layout.pool_nbytes, dtype=np.uint8)
    dst = np.zeros(dst_layout.pool_nbytes, dtype=np.uint8)
    plan = plan_ranges(src_layout, src_blocks, dst_blocks, start, end)
    for layer in range(src_layout.num_layers):
        for local, remote, nbytes in plan:
            a, b = local + layer * src_layout.layer_nbytes, remote + layer * dst_layout.layer_nbytes
            dst[b : b + nbytes] = src[a : a + nbytes]
    source, target = view(src, src_layout), view(dst, dst_layout)
    expected = np.zeros_like(target)
    for position in range(start, end):
        logical, offset = divmod(position, block_size)
        expected[:, dst_blocks[logical], :, offset] = source[:, src_blocks[logical], :, offset]
    assert np.array_equal(target, expected)
    assert plan[:, 2].sum() * src_layout.num_layers == (end - start) * src_layout.bytes_per_token

    starts, ends = write_ranges(dst_layout, dst_blocks, start, end)
    assert np.array_equal(np.flatnonzero(dst), np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)] or [[]]))
    assert (starts < ends).all()
    assert (ends[:-1] < starts[1:]).all()


def test_run_of_full_blocks_is_one_range() -> None:
    plan = plan_ranges(layout(10), [2, 3, 4], [5, 6, 7], 0, 12)
    unit = layout(10).block_nbytes
    assert plan.tolist() == [[2 * unit, 5 * unit, 3 * unit]]


def test_break_on_either_side_splits_a_range() -> None:
    assert len(plan_ranges(layout(10), [2, 3, 4], [5, 6, 8], 0, 12)) == 2
    assert len(plan_ranges(layout(10), [2, 4, 5], [5, 6, 7], 0, 12)) == 2


def test_tokens_inside_a_block_are_two_ranges() -> None:
    of = layout(10)
    plan = plan_ranges(of, [2], [5], 1, 3)
    assert plan[:, 2].tolist() == [2 * of.token_nbytes] * 2


def test_whole_pool_is_one_window_range() -> None:
    of = layout(4)
    starts, ends = write_ranges(of, [3, 1, 0, 2], 0, 16)
    assert (starts.tolist(), ends.tolist()) == ([0], [of.pool_nbytes])


def test_nothing_missing_is_no_range() -> None:
    assert plan_ranges(layout(4), [1], [2], 4, 4).shape == (0, 3)
    assert [len(part) for part in write_ranges(layout(4), [1], 4, 4)] == [0, 0]


def test_tokens_beyond_the_table_are_refused() -> None:
    with pytest.raises(ValueError, match="lie outside"):
        plan_ranges(layout(4), [1], [2], 0, 5)


def test_planted_shift_after_a_prefix_hit_is_seen() -> None:
    """The historic mistake: indexing the target's table from its first missing block instead of from logical block 0."""
    of = layout(8)
    right = plan_ranges(of, [0, 1, 2], [5, 6, 7], 4, 12)
    wrong = plan_ranges(of, [1, 2], [5, 6], 0, 8)
    assert not np.array_equal(right, wrong)
