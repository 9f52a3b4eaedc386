from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.errors import NoCapacityError
from pd_serve.kv.block_pool import BlockPool

SIZE = 4


def publish(pool: BlockPool, ids: list[int]) -> tuple[int, ...]:
    """Compute and publish a whole prompt, then let go of it."""
    blocks = pool.allocate(pool.num_blocks_for(len(ids)))
    pool.publish(ids, blocks, len(ids))
    pool.release(blocks)
    return blocks


def test_allocation_is_one_run_when_a_run_is_free() -> None:
    pool = BlockPool(10, SIZE)
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.release((1,))
    assert pool.allocate(3) == (4, 5, 6)


def test_growth_takes_the_block_right_behind() -> None:
    pool = BlockPool(10, SIZE)
    first = pool.allocate(2)
    other = pool.allocate(2)
    gap = pool.allocate(2)
    pool.release(gap)
    assert pool.allocate(1, after=other[-1]) == (4,)
    assert pool.allocate(1, after=first[-1]) == (5,)


def test_smallest_run_that_holds_the_request_is_used() -> None:
    pool = BlockPool(10, SIZE)
    pool.allocate(10)
    pool.release((1, 2, 3, 5, 6, 8))
    assert pool.allocate(2) == (5, 6)
    assert pool.allocate(1) == (8,)
    assert pool.allocate(3) == (1, 2, 3)


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = BlockPool(4, SIZE)
    publish(pool, list(range(8)))
    pool.allocate(1)
    before = pool.counts()
    with pytest.raises(NoCapacityError):
        pool.allocate(4)
    assert pool.counts() == before
    assert len(pool.match_prefix([*range(8), 99])) == 2


def test_shared_block_is_free_only_after_its_last_holder() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    pool.retain(blocks)
    pool.release(blocks)
    assert pool.counts().free == 1
    pool.release(blocks)
    assert pool.counts().free == 2


def test_releasing_more_often_than_held_is_caught() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_prefix_match_leaves_a_token_to_compute() -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(8))
    blocks = publish(pool, ids)
    assert pool.match_prefix(ids) == blocks[:1]
    assert pool.match_prefix([*ids, 8]) == blocks
    assert pool.match_prefix(ids[:4]) == ()
    assert pool.match_prefix([1]) == ()


def test_prefix_match_ends_at_the_first_difference() -> None:
    pool = BlockPool(8, SIZE)
    blocks = publish(pool, list(range(12)))
    other = [*range(4), 77, *range(5, 13)]
    assert pool.match_prefix(other) == blocks[:1]


def test_same_tokens_behind_another_prefix_do_not_match() -> None:
    pool = BlockPool(8, SIZE)
    publish(pool, [1, 1, 1, 1, 5, 6, 7, 8])
    assert pool.match_prefix([2, 2, 2, 2, 5, 6, 7, 8, 9]) == ()


def test_partly_computed_block_is_not_published() -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(10))
    blocks = pool.allocate(3)
    pool.publish(ids, blocks, 7)
    assert pool.match_prefix(ids) == blocks[:1]


def test_first_writer_wins_and_the_duplicate_is_freed() -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(8))
    first, second = pool.allocate(2), pool.allocate(2)
    pool.publish(ids, first, 8)
    pool.publish(ids, second, 8)
    pool.release(second)
    pool.release(first)
    assert (pool.counts().cached, pool.counts().free) == (2, 6)
    assert pool.match_prefix([*ids, 9]) == first


def test_chain_goes_on_from_a_duplicate() -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(12))
    first, second = pool.allocate(2), pool.allocate(3)
    pool.publish(ids, first, 8)
    pool.publish(ids, second, 8)
    pool.publish(ids, second, 12)
    assert pool.match_prefix([*ids, 99]) == (*first, second[2])


def test_least_recently_used_prefix_is_evicted_first_and_leaves_before_roots() -> None:
    pool = BlockPool(4, SIZE)
    a, b = list(range(8)), list(range(100, 108))
    blocks_a, _ = publish(pool, a), publish(pool, b)
    pool.release(pool.match_prefix([*a, 9]))
    pool.allocate(1)
    matched = pool.match_prefix([*b, 9])
    assert len(matched) == 1
    pool.release(matched)
    assert pool.match_prefix([*a, 9]) == blocks_a


def test_cached_blocks_are_not_touched_while_free_ones_remain() -> None:
    pool = BlockPool(4, SIZE)
    ids = list(range(8))
    publish(pool, ids)
    pool.allocate(2)
    assert pool.counts().cached == 2


def test_evicted_block_is_not_found_again() -> None:
    pool = BlockPool(2, SIZE)
    ids = list(range(8))
    publish(pool, ids)
    held = pool.allocate(2)
    assert pool.match_prefix([*ids, 9]) == ()
    pool.release(held)
    assert pool.counts().free == 2


def test_without_prefix_cache_nothing_is_kept() -> None:
    pool = BlockPool(4, SIZE, prefix_cache=False)
    publish(pool, list(range(8)))
    assert pool.counts().free == 4
    assert pool.match_prefix(list(range(9))) == ()


def test_dropped_cache_frees_everything_not_held() -> None:
    pool = BlockPool(6, SIZE)
    publish(pool, list(range(8)))
    held = pool.allocate(2)
    pool.publish(list(range(50, 58)), held, 8)
    pool.drop_cache()
    assert (pool.counts().free, pool.counts().cached) == (4, 0)
    pool.release(held)
    assert pool.counts().free == 6


@settings(max_examples=80, deadline=None)
@given(rng=st.randoms(use_true_random=False), num_blocks=st.integers(1, 30))
def test_blocks_are_conserved_and_content_is_what_was_published(rng: random.Random, num_blocks: int) -> None:
    """Each block remembers the tokens last written into it, so a wrong match or a reuse of a held block shows."""
    pool = BlockPool(num_blocks, SIZE)
    content: dict[int, tuple[int, ...]] = {}
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        if held and rng.random() < 0.45:
            _, blocks = held.pop(rng.randrange(len(held)))
            pool.release(blocks)
        else:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
            matched = list(pool.match_prefix(ids))
            for index, block in enumerate(matched):
                assert content[block] == tuple(ids[: (index + 1) * SIZE])
            missing = pool.num_blocks_for(len(ids)) - len(matched)
            if missing > pool.num_allocatable:
                pool.release(matched)
                continue
            fresh = pool.allocate(missing)
            in_use = {block for _, blocks in held for block in blocks}
            assert not in_use & set(fresh)
            assert not set(matched) & set(fresh)
            blocks = matched + list(fresh)
            for index in range(len(matched), len(blocks)):
                content[blocks[index]] = tuple(ids[: (index + 1) * SIZE])
            pool.publish(ids, blocks, rng.randint(len(matched) * SIZE, len(ids)))
            held.append((ids, blocks))
        pool.check()
        references = [block for _, blocks in held for block in blocks]
        assert all(pool.ref_count(block) == references.count(block) for block in set(references))
        assert pool.counts().held == len(set(references))
    for _, blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.counts().held == 0


def test_planted_leak_is_caught_by_check() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    del pool._refs[blocks[0]]
    with pytest.raises(AssertionError):
        pool.check()


def test_planted_double_use_is_caught_by_check() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    pool._free.put([blocks[0]])
    with pytest.raises(AssertionError):
        pool.check()
