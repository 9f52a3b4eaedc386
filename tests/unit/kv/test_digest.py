"""The digest of KV speaks of tokens, not of where they lie or in what pieces they came."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.digest import DIGEST_NBYTES, KVDigest, TokenSpan, digest_of_pool
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.transfer import plan_ranges

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=12, dtype=KVDtype.FLOAT32)
SOURCE, TARGET = (7, 2, 9), (1, 11, 4)


def noise(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def add_up(*digests: bytes) -> bytes:
    total = sum(int.from_bytes(digest, "little") for digest in digests) % 2**64
    return total.to_bytes(DIGEST_NBYTES, "little")


def byte_by_byte(memory: NDArray[np.uint8], layout: KVLayout, blocks: tuple[int, ...], start: int, end: int) -> bytes:
    """The definition, for token-major layouts."""

    def key(index: int) -> int:
        mixed = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    words = -(-layout.num_planes * layout.token_nbytes // 8)
    total = 0
    for layer in range(layout.num_layers):
        for token in range(start, end):
            base = layout.block_offset(layer, blocks[token // layout.block_size])
            row = b""
            for segment in layout.segments():
                at = base + segment.offset + token % layout.block_size * segment.stride
                row += memory[at : at + segment.nbytes].tobytes()
            for place, byte in enumerate(row):
                total += (byte << 8 * (place % 8)) * key((layer << 40) + token * words + place // 8)
    return (total % 2**64).to_bytes(DIGEST_NBYTES, "little")


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.FP8_E4M3])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_it_is_what_it_is_defined_to_be(dtype: KVDtype, num_heads: int) -> None:
    layout = KVLayout(2, num_heads, 4, 4, 9, dtype)
    memory = noise(layout.pool_nbytes)
    assert digest_of_pool(memory, layout, TokenSpan((3, 8, 0), 2, 11)) == byte_by_byte(memory, layout, (3, 8, 0), 2, 11)


@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (4, 11), (8, 9)])
def test_what_was_pushed_as_it_lies_has_the_digest_of_its_source(start: int, end: int) -> None:
    source, target = noise(LAYOUT.pool_nbytes), noise(LAYOUT.pool_nbytes, 2)
    for layer in range(LAYOUT.num_layers):
        for local, remote, nbytes in (
            plan_ranges(LAYOUT, SOURCE, TARGET, start, end) + np.array([layer * LAYOUT.layer_nbytes] * 2 + [0])
        ).tolist():
            target[remote : remote + nbytes] = source[local : local + nbytes]
    sent = digest_of_pool(source, LAYOUT, TokenSpan(SOURCE, start, end))
    assert digest_of_pool(target, LAYOUT, TokenSpan(TARGET, start, end)) == sent


@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_pieces_of_any_size_and_any_heads_add_up_to_what_lies_in_the_pool(rng: random.Random) -> None:
    num_heads = rng.randint(1, 4)
    order, dtype = rng.choice(list(KVOrder)), rng.choice(list(KVDtype))
    dst = KVLayout(2, num_heads, rng.choice([4, 6]), rng.choice([1, 3, 8]), 40, dtype, rng.choice([1, 2]), order)
    src = KVLayout(2, num_heads, dst.head_dim, 4, 40, KVDtype.FLOAT32, dst.num_planes)
    end = rng.randint(1, 30)
    start = rng.randrange(end)
    blocks, src_blocks = (tuple(rng.sample(range(40), layout.num_blocks_for(end))) for layout in (dst, src))
    memory, parts = noise(dst.pool_nbytes), []
    cut = rng.randint(0, num_heads)
    for head, count in ((0, cut), (cut, num_heads - cut)):
        if not count:
            continue
        sent = KVDigest()
        pieces = list(plan_packings(src, dst, HeadSlice(head, head, count), src_blocks, blocks, start, end, rng.choice([50, 300, 1 << 20])))
        for packing, layer in rng.sample([(packing, layer) for packing in pieces for layer in (0, 1)], 2 * len(pieces)):
            packed = noise(packing.nbytes, rng.randrange(1 << 20))
            sent.add_packed(packed, packing, layer)
            for local, remote, nbytes in packing.ranges.tolist():
                memory[remote + layer * dst.layer_nbytes :][:nbytes] = packed[local : local + nbytes]
        parts.append(sent.to_bytes())
        alone = KVDigest()
        for layer in (0, 1):
            alone.add_pool(memory, dst, TokenSpan(blocks, start, end), layer, range(head, head + count))
        assert alone.to_bytes() == parts[-1], "a route's own"
    assert digest_of_pool(memory, dst, TokenSpan(blocks, start, end)) == add_up(*parts)


def test_more_than_fits_the_cache_is_split_without_a_trace() -> None:
    layout = KVLayout(1, 8, 64, 16, 20, KVDtype.FLOAT32)
    memory, blocks = noise(layout.pool_nbytes), tuple(range(19, -1, -1))
    parts = [digest_of_pool(memory, layout, TokenSpan(blocks, *span)) for span in ((3, 100), (100, 101), (101, 317))]
    assert digest_of_pool(memory, layout, TokenSpan(blocks, 3, 317)) == add_up(*parts)


def test_one_changed_byte_of_any_layer_changes_it() -> None:
    pool, span = noise(LAYOUT.pool_nbytes), TokenSpan(SOURCE, 2, 10)
    before = digest_of_pool(pool, LAYOUT, span)
    for layer in range(LAYOUT.num_layers):
        offset = LAYOUT.block_offset(layer, SOURCE[1]) + 5
        pool[offset] ^= 1
        assert digest_of_pool(pool, LAYOUT, span) != before
        pool[offset] ^= 1
    pool[LAYOUT.block_offset(0, 0)] ^= 1  # nobody's
    pool[LAYOUT.block_offset(0, SOURCE[0])] ^= 1  # of a token before
    assert digest_of_pool(pool, LAYOUT, span) == before


@pytest.mark.parametrize("wrong", [(2, 7, 9), (7, 9, 2)])
def test_blocks_in_each_others_place_change_it(wrong: tuple[int, ...]) -> None:
    pool = noise(LAYOUT.pool_nbytes)
    assert digest_of_pool(pool, LAYOUT, TokenSpan(wrong, 0, 12)) != digest_of_pool(pool, LAYOUT, TokenSpan(SOURCE, 0, 12))
