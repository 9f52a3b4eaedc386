"""The digest of KV speaks of where bytes lie at the target, not of how they came there."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.digest import DIGEST_NBYTES, KVDigest, digest_in_place
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.transfer import plan_ranges, write_ranges

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=12, dtype=KVDtype.FLOAT32)
SOURCE, TARGET = (7, 2, 9), (1, 11, 4)


def noise(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def one_by_one(memory: NDArray[np.uint8], rows: NDArray[np.int64]) -> bytes:
    """The definition, byte by byte."""

    def key(index: int) -> int:
        mixed = (index + 1) * 0x9E3779B97F4A7C15 % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        return (mixed ^ mixed >> 31) | 1

    total = 0
    for local, remote, nbytes in rows.tolist():
        for at in range(nbytes):
            total += (int(memory[local + at]) << 8 * ((remote + at) % 8)) * key((remote + at) // 8)
    return (total % 2**64).to_bytes(DIGEST_NBYTES, "little")


@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_pieces_of_any_size_and_order_add_up_to_the_whole(rng: random.Random) -> None:
    source, target = noise(4096), np.zeros(4096, np.uint8)
    cuts = sorted(rng.sample(range(3000), rng.randint(2, 30)))
    at = rng.randrange(1000)
    rows = np.array([(first, at + first, past - first) for first, past in pairwise(cuts)], np.int64)
    for local, remote, nbytes in rows:
        target[remote : remote + nbytes] = source[local : local + nbytes]
    sent = KVDigest(source)
    shuffled = rng.sample(rows.tolist(), len(rows))
    half = rng.randint(0, len(rows))
    for part in (shuffled[:half], shuffled[half:]):
        sent.add(np.array(part, np.int64).reshape(-1, 3))
    arrived = digest_in_place(target, np.array([at + cuts[0]]), np.array([at + cuts[-1]]))
    assert sent.to_bytes() == arrived == one_by_one(source, rows)


def test_more_than_fits_the_cache_is_split_without_a_trace() -> None:
    memory = noise(200_000)
    whole, halves = KVDigest(memory), KVDigest(memory)
    whole.add(np.array([(3, 5, 150_001)]))
    halves.add(np.array([(3, 5, 70_001), (70_004, 70_006, 80_000)]))
    assert whole.to_bytes() == halves.to_bytes()


@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (4, 11), (8, 9)])
def test_what_was_pushed_has_the_digest_of_the_write_window(start: int, end: int) -> None:
    source, target = noise(LAYOUT.pool_nbytes), noise(LAYOUT.pool_nbytes, 2)
    sent = KVDigest(source)
    for layer in range(LAYOUT.num_layers):
        shift = layer * LAYOUT.layer_nbytes
        rows = plan_ranges(LAYOUT, SOURCE, TARGET, start, end) + np.array([shift, shift, 0])
        sent.add(rows)
        for local, remote, nbytes in rows.tolist():
            target[remote : remote + nbytes] = source[local : local + nbytes]
    assert digest_in_place(target, *write_ranges(LAYOUT, TARGET, start, end)) == sent.to_bytes()


@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3, KVDtype.BFLOAT16])
def test_routes_to_a_rank_add_up_to_its_window(order: KVOrder, dtype: KVDtype) -> None:
    """Two sources, a head each, in pieces of different sizes; each has the digest of its own heads."""
    dst = KVLayout(2, 2, 4, 8, 9, dtype, 2, order)
    src = KVLayout(2, 1, 4, 4, 9, KVDtype.FLOAT32)
    blocks, src_blocks = (7, 2), (3, 1, 8, 0)
    target, together = np.zeros(dst.pool_nbytes, np.uint8), 0
    for head, limit in ((0, 40), (1, 1 << 20)):
        slot = noise(4096, 5 + head)
        sent = KVDigest(slot)
        for packing in plan_packings(src, dst, HeadSlice(0, head, 1), src_blocks, blocks, 1, 13, limit):
            for layer in (0, 1):
                rows = packing.ranges + np.array([0, layer * dst.layer_nbytes, 0])
                sent.add(rows)
                for local, remote, nbytes in rows.tolist():
                    target[remote : remote + nbytes] = slot[local : local + nbytes]
        heads = range(head, head + 1)
        assert digest_in_place(target, *write_ranges(dst, blocks, 1, 13, heads)) == sent.to_bytes()
        together += int.from_bytes(sent.to_bytes(), "little")
    whole = digest_in_place(target, *write_ranges(dst, blocks, 1, 13))
    assert int.from_bytes(whole, "little") == together % 2**64


def test_one_changed_byte_of_any_layer_changes_it() -> None:
    pool = noise(LAYOUT.pool_nbytes)
    window = write_ranges(LAYOUT, SOURCE, 2, 10)
    before = digest_in_place(pool, *window)
    for layer in range(LAYOUT.num_layers):
        offset = LAYOUT.block_offset(layer, SOURCE[1]) + 5
        pool[offset] ^= 1
        assert digest_in_place(pool, *window) != before
        pool[offset] ^= 1
    pool[LAYOUT.block_offset(0, 0)] ^= 1  # nobody's
    assert digest_in_place(pool, *window) == before


def test_bytes_in_each_others_place_change_it() -> None:
    memory = np.arange(64, dtype=np.uint8)
    right, wrong = KVDigest(memory), KVDigest(memory)
    right.add(np.array([(0, 128, 32), (32, 512, 32)]))
    wrong.add(np.array([(0, 512, 32), (32, 128, 32)]))
    assert right.to_bytes() != wrong.to_bytes()
