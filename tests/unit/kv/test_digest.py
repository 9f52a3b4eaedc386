"""The digest of KV speaks of tokens, not of where they lie."""

from __future__ import annotations

import random

import pytest

from pd_serve.kv.digest import HostKVDigest
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.kv.transfer import plan_ranges

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=12, dtype=KVDtype.FLOAT32)
SOURCE, TARGET = (7, 2, 9), (1, 11, 4)


def _push(source: bytearray, target: bytearray, start: int, end: int) -> None:
    for layer in range(LAYOUT.num_layers):
        shift = layer * LAYOUT.layer_nbytes
        for local, remote, nbytes in plan_ranges(LAYOUT, SOURCE, TARGET, start, end).tolist():
            target[remote + shift : remote + shift + nbytes] = source[local + shift : local + shift + nbytes]


@pytest.mark.parametrize(("start", "end"), [(0, 12), (0, 1), (4, 11), (8, 9)])
def test_what_was_pushed_has_the_digest_of_its_source(start: int, end: int) -> None:
    source = bytearray(random.Random(1).randbytes(LAYOUT.pool_nbytes))
    target = bytearray(LAYOUT.pool_nbytes)
    _push(source, target, start, end)
    sent = HostKVDigest(LAYOUT, memoryview(source))(SOURCE, start, end)
    assert HostKVDigest(LAYOUT, memoryview(target))(TARGET, start, end) == sent


def test_one_changed_byte_of_any_layer_changes_it() -> None:
    pool = bytearray(random.Random(2).randbytes(LAYOUT.pool_nbytes))
    digest = HostKVDigest(LAYOUT, memoryview(pool))
    before = digest(SOURCE, 2, 10)
    for layer in range(LAYOUT.num_layers):
        offset = LAYOUT.block_offset(layer, SOURCE[1]) + 5
        pool[offset] ^= 1
        assert digest(SOURCE, 2, 10) != before
        pool[offset] ^= 1
    assert digest(SOURCE, 2, 10) == before
