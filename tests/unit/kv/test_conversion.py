"""Plans are checked by carrying them out on arrays that are read back through the layouts' own shapes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.transfer import write_ranges

DIM = 4


def elements(pool: NDArray[np.uint8], of: KVLayout) -> NDArray[np.uint8]:
    """[layers, blocks, planes, block_size, heads, bytes of a head's elements], without scales."""
    width = of.head_dim * of.dtype.nbytes
    planes = pool.reshape(of.num_layers, of.num_blocks, of.num_planes, of.plane_nbytes)[..., : of.block_size * of.num_kv_heads * width]
    if of.order is KVOrder.TOKEN_MAJOR:
        return planes.reshape(*planes.shape[:3], of.block_size, of.num_kv_heads, width)
    return planes.reshape(*planes.shape[:3], of.num_kv_heads, of.block_size, width).swapaxes(3, 4)


def scales(pool: NDArray[np.uint8], of: KVLayout) -> NDArray[np.uint8]:
    """[layers, blocks, planes, block_size, heads]"""
    width = of.head_dim * of.dtype.nbytes
    planes = pool.reshape(of.num_layers, of.num_blocks, of.num_planes, of.plane_nbytes)[..., of.block_size * of.num_kv_heads * width :]
    if of.order is KVOrder.TOKEN_MAJOR:
        return planes.reshape(*planes.shape[:3], of.block_size, of.num_kv_heads)
    return planes.reshape(*planes.shape[:3], of.num_kv_heads, of.block_size).swapaxes(3, 4)


def pack(rows: NDArray[np.uint8], row_scales: NDArray[np.uint8], order: KVOrder, has_scales: bool) -> NDArray[np.uint8]:
    """What an engine's packer does with `rows` [planes, tokens, heads, bytes] and `row_scales` [planes, tokens, heads]."""
    parts: list[NDArray[np.uint8]] = []
    for plane, scale in zip(rows, row_scales, strict=True):
        parts.append((plane if order is KVOrder.TOKEN_MAJOR else plane.swapaxes(0, 1)).ravel())
        if has_scales:
            parts.append((scale if order is KVOrder.TOKEN_MAJOR else scale.T).ravel())
    return np.concatenate(parts)


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_every_token_of_every_head_lands_in_its_place_and_nothing_else_is_written(rng: random.Random) -> None:
    num_planes = rng.choice([1, 2])
    dtype = rng.choice([KVDtype.FP8_E4M3, KVDtype.BFLOAT16])
    src_heads, dst_heads = rng.randint(1, 4), rng.randint(1, 4)
    count = rng.randint(1, min(src_heads, dst_heads))
    heads = HeadSlice(rng.randint(0, src_heads - count), rng.randint(0, dst_heads - count), count)
    src = KVLayout(2, src_heads, DIM, rng.choice([1, 2, 3, 8]), 24, KVDtype.BFLOAT16, num_planes)
    dst = KVLayout(2, dst_heads, DIM, rng.choice([1, 2, 5, 16]), 40, dtype, num_planes, rng.choice(list(KVOrder)))
    end = rng.randint(1, 20)
    start = rng.randint(0, end)
    src_blocks = rng.sample(range(src.num_blocks), src.num_blocks_for(end))
    dst_blocks = rng.sample(range(dst.num_blocks), dst.num_blocks_for(end))
    generator = np.random.default_rng(rng.randrange(1 << 30))
    width = dst.head_dim * dst.dtype.nbytes
    # What the packer makes of each token: any bytes that are its own.
    rows = generator.integers(1, 256, (2, num_planes, end, count, width), dtype=np.uint8)
    row_scales = generator.integers(1, 256, (2, num_planes, end, count), dtype=np.uint8)

    pool = np.zeros(dst.pool_nbytes, dtype=np.uint8)
    max_nbytes = rng.choice([1, 100, 1000, 1 << 20])
    following = start
    for packing in plan_packings(src, dst, heads, src_blocks, dst_blocks, start, end, max_nbytes):
        assert packing.start_token == following
        following = packing.end_token
        assert packing.num_tokens == 1 or packing.nbytes <= max_nbytes
        tokens = slice(packing.start_token, packing.end_token)
        for layer in range(2):
            packed = pack(rows[layer][:, tokens], row_scales[layer][:, tokens], dst.order, dst.dtype.has_scales)
            assert len(packed) == packing.nbytes == packing.ranges[:, 2].sum()
            for local, remote, nbytes in packing.ranges:
                at = remote + layer * dst.layer_nbytes
                pool[at : at + nbytes] = packed[local : local + nbytes]
    assert following == end

    got = elements(pool, dst)
    expected = np.zeros_like(got)
    got_scales = scales(pool, dst) if dst.dtype.has_scales else np.empty(0)
    expected_scales = np.zeros_like(got_scales)
    chosen = slice(heads.dst_start, heads.dst_start + count)
    for position in range(start, end):
        logical, offset = divmod(position, dst.block_size)
        expected[:, dst_blocks[logical], :, offset, chosen] = rows[:, :, position]
        if dst.dtype.has_scales:
            expected_scales[:, dst_blocks[logical], :, offset, chosen] = row_scales[:, :, position]
    assert np.array_equal(got, expected)
    assert np.array_equal(got_scales, expected_scales)

    starts, ends = write_ranges(dst, dst_blocks, start, end, heads.dst)
    written = [np.arange(a, b) for a, b in zip(starts, ends, strict=True)]
    assert np.array_equal(np.flatnonzero(pool), np.concatenate(written or [np.empty(0, dtype=int)]))


def test_a_full_target_block_is_one_range_per_segment() -> None:
    src = KVLayout(1, 2, DIM, 16, 8, KVDtype.BFLOAT16)
    dst = KVLayout(1, 2, DIM, 32, 8, KVDtype.BFLOAT16)
    (packing,) = plan_packings(src, dst, HeadSlice(0, 0, 2), [1, 2, 3, 4], [5, 3], 0, 64, 1 << 20)
    half = 32 * 2 * DIM * 2
    assert sorted(packing.ranges.tolist()) == [
        [0, 5 * dst.block_nbytes, half],
        [half, 3 * dst.block_nbytes, half],
        [2 * half, 5 * dst.block_nbytes + half, half],
        [3 * half, 3 * dst.block_nbytes + half, half],
    ]


def test_long_packings_are_cut_where_target_blocks_begin() -> None:
    src = KVLayout(1, 1, DIM, 16, 8, KVDtype.FLOAT32)
    dst = KVLayout(1, 1, DIM, 8, 16, KVDtype.FLOAT32)
    cuts = [packing.end_token for packing in plan_packings(src, dst, HeadSlice(0, 0, 1), range(4), range(8), 5, 64, 20 * 2 * DIM * 4)]
    assert cuts == [16, 32, 48, 64]


def test_layouts_of_other_models_are_refused() -> None:
    src = KVLayout(1, 1, DIM, 16, 8, KVDtype.FLOAT32)
    with pytest.raises(ValueError, match="cannot become"):
        list(plan_packings(src, KVLayout(2, 1, DIM, 16, 8, KVDtype.FLOAT32), HeadSlice(0, 0, 1), [0], [0], 0, 1, 1000))
