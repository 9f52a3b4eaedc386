"""What a pool notes for those who follow its prefix cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.prefix_chain import ROOT, chain_digests
from pd_serve.kv.prefix_index import PrefixChanges, PrefixIndex

SIZE = 4


def publish(pool: BlockPool, ids: list[int]) -> tuple[int, ...]:
    blocks = pool.allocate(pool.num_blocks_for(len(ids)))
    pool.publish(ids, blocks, len(ids))
    pool.release(blocks)
    return blocks


def digests(ids: list[int]) -> tuple[bytes, ...]:
    return tuple(chain_digests(ids, SIZE, 0, len(ids) // SIZE))


@pytest.mark.parametrize("block_size", [1, 3, 16, 256, 300])
def test_a_chain_is_the_same_in_one_go_and_from_its_middle(block_size: int) -> None:
    ids = [index * 7919 % 50_000 for index in range(block_size * 40 + 1)]
    whole = list(chain_digests(ids, block_size, 0, 40))
    assert len(whole) == len(set(whole)) == 40
    assert list(chain_digests(tuple(ids), block_size, 17, 40, whole[16])) == whole[17:]
    assert list(chain_digests(ids, block_size, 0, 0, ROOT)) == []


def test_nothing_is_noted_while_nobody_listens() -> None:
    pool = BlockPool(4, SIZE)
    publish(pool, list(range(8)))
    assert pool.prefixes.take_changes() == PrefixChanges()
    pool.prefixes.listen(True)
    assert pool.prefixes.take_changes() == PrefixChanges()
    publish(pool, list(range(50, 54)))
    pool.prefixes.listen(False)
    assert pool.prefixes.take_changes() == PrefixChanges()


def test_published_blocks_are_stored_and_evicted_ones_removed() -> None:
    pool = BlockPool(4, SIZE)
    pool.prefixes.listen(True)
    ids = list(range(10))
    publish(pool, ids)
    assert pool.prefixes.take_changes() == PrefixChanges(stored=digests(ids))
    pool.allocate(3)
    assert pool.prefixes.take_changes() == PrefixChanges(removed=digests(ids)[1:])


def test_a_removed_digest_is_noted_before_its_block_is_handed_out() -> None:
    pool = BlockPool(2, SIZE)
    pool.prefixes.listen(True)
    blocks = publish(pool, list(range(8)))
    told = set(pool.prefixes.take_changes().stored)
    for _ in blocks:
        pool.allocate(1)
        told -= set(pool.prefixes.take_changes().removed)
        assert told == set(pool.prefixes.digests())
    assert not told


def test_a_duplicate_is_no_event_and_neither_is_its_end() -> None:
    pool = BlockPool(8, SIZE)
    pool.prefixes.listen(True)
    ids = list(range(8))
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish(ids, first, 8)
    pool.prefixes.take_changes()
    pool.publish(ids, second, 8)
    pool.release(second)
    assert pool.prefixes.take_changes() == PrefixChanges()


def test_what_came_and_went_between_two_looks_is_no_event() -> None:
    pool = BlockPool(2, SIZE)
    ids, other = list(range(8)), list(range(50, 58))
    publish(pool, ids)
    pool.prefixes.listen(True)
    publish(pool, other)
    publish(pool, ids)
    assert pool.prefixes.take_changes() == PrefixChanges()


def test_a_dropped_cache_is_removed_whole() -> None:
    pool = BlockPool(6, SIZE)
    pool.prefixes.listen(True)
    ids, held = list(range(8)), pool.allocate(2)
    publish(pool, ids)
    pool.publish(list(range(50, 58)), held, 8)
    assert len(pool.prefixes.take_changes().stored) == 4
    pool.drop_cache()
    assert len(pool.prefixes.take_changes().removed) == 4
    assert pool.prefixes.digests() == ()


def play(rng: random.Random, num_blocks: int) -> None:
    """Any life of a pool, looked at now and then: what was told is what can be found, and no event says what was known already."""
    pool = BlockPool(num_blocks, SIZE)
    pool.prefixes.listen(True)
    told: set[bytes] = set()
    held: list[tuple[int, ...]] = []
    for _ in range(60):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            matched = pool.match_prefix(ids)
            missing = pool.num_blocks_for(len(ids)) - len(matched)
            if missing > pool.num_allocatable:
                pool.release(matched)
                continue
            blocks = matched + pool.allocate(missing)
            pool.publish(ids, blocks, rng.randint(len(matched) * SIZE, len(ids)))
            held.append(blocks)
        if rng.random() < 0.02:
            pool.drop_cache()
        if rng.random() < 0.4:
            changes = pool.prefixes.take_changes()
            assert not told & set(changes.stored)
            assert told >= set(changes.removed)
            told = (told | set(changes.stored)) - set(changes.removed)
            assert told == set(pool.prefixes.digests())
            assert len(told) == len(pool.prefixes)


@settings(max_examples=30, deadline=None)
@given(rng=st.randoms(use_true_random=False), num_blocks=st.integers(1, 30))
def test_replayed_events_give_what_is_published(rng: random.Random, num_blocks: int) -> None:
    play(rng, num_blocks)


def test_an_eviction_that_is_not_noted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: PrefixIndex, block: int) -> None:
        digest = self._digest_by_block.pop(block, None)
        if digest is not None and self._block_by_digest.get(digest) == block:
            del self._block_by_digest[digest]

    monkeypatch.setattr(PrefixIndex, "forget", forget)
    with pytest.raises(AssertionError):
        play(random.Random(0), 8)
