"""The pool: counts come back to nothing, shared blocks are held once, the least recently used goes first."""

from __future__ import annotations

import random

from pd_serve.plan.sim.caches import Holding, KVPool

KEYS = (11, 12, 13, 14)


def filled(pool: KVPool, keys: tuple[int, ...] = KEYS, num_tokens: int = 70) -> Holding:
    holding = pool.hold(keys, 0, 80)
    pool.publish(holding, keys, num_tokens)
    return holding


def test_blocks_are_found_when_they_are_computed_and_one_token_is_left() -> None:
    pool = KVPool(1000, 16, is_told=False)
    assert pool.match(KEYS, 70) == 0
    filled(pool)
    assert pool.match(KEYS, 70) == 4
    assert pool.match(KEYS, 64) == 3
    assert pool.match((11, 12, 99, 14), 70) == 2


def test_shared_blocks_are_held_once_and_stay_for_whoever_is_left() -> None:
    pool = KVPool(1000, 16, is_told=False)
    first = filled(pool)
    assert pool.num_to_take(KEYS, 4, 16) == 16
    second = pool.hold(KEYS, 4, 16)
    assert pool.num_held == 80 + 16
    pool.release(first)
    assert (pool.num_held, pool.num_idle) == (64 + 16, 0)
    pool.release(second)
    assert (pool.num_held, pool.num_idle, pool.num_free) == (0, 64, 936)


def test_behind_a_block_that_somebody_else_had_first_the_next_ones_are_offered() -> None:
    pool = KVPool(1000, 16, is_told=False)
    first, second = pool.hold((), 0, 80), pool.hold((), 0, 80)
    pool.publish(first, KEYS[:2], 40)
    pool.publish(second, KEYS, 70)
    assert pool.match(KEYS, 70) == 4
    assert second.num_own == 80 - 32, "it keeps its own copy of the first two"
    pool.release(first)
    pool.release(second)
    assert (pool.num_held, pool.num_idle) == (0, 64)


def test_memory_that_is_wanted_takes_what_was_used_longest_ago() -> None:
    pool = KVPool(200, 16, is_told=True)
    pool.release(filled(pool, (1, 2, 3, 4)))
    pool.release(filled(pool, (5, 6, 7, 8)))
    pool.release(pool.hold((1, 2), 2, 0))
    assert pool.changes() == ([1, 2, 3, 4, 5, 6, 7, 8], [])
    wanted = pool.hold((), 0, 120)
    assert pool.match((5, 6, 7, 8), 100) == 3, "the deepest of the older ones went first"
    assert pool.match((1, 2, 3, 4), 100) == 2
    assert pool.changes() == ([], [4, 3, 8])
    pool.release(wanted)
    assert pool.num_held == 0


def test_what_came_and_went_between_two_reports_is_not_told() -> None:
    pool = KVPool(80, 16, is_told=True)
    pool.release(filled(pool))
    pool.release(pool.hold((), 0, 80))
    assert pool.changes() == ([], [])


def test_random_use_leaves_nothing_held() -> None:
    rng = random.Random(1)
    pool = KVPool(4000, 16, is_told=True)
    told: set[int] = set()
    held: list[tuple[Holding, int]] = []
    for _ in range(3000):
        if held and (rng.random() < 0.5 or pool.num_allocatable < 600):
            holding, grown = held.pop(rng.randrange(len(held)))
            pool.release(holding, grown)
            continue
        keys = tuple(range(base := 100 * rng.randrange(12), base + rng.randrange(1, 20)))
        num_tokens = len(keys) * 16 + rng.randrange(1, 16)
        num_blocks = pool.match(keys, num_tokens)
        holding = pool.hold(keys, num_blocks, num_tokens - 16 * num_blocks)
        pool.publish(holding, keys, num_tokens)
        pool.take(grown := rng.randrange(50))
        held.append((holding, grown))
        assert 0 <= pool.num_free <= pool.num_free + pool.num_idle <= pool.capacity
        stored, removed = pool.changes()
        told = (told | set(stored)) - set(removed)
        assert told == set(pool._holders)
    for holding, grown in held:
        pool.release(holding, grown)
    assert pool.num_held == 0
    assert pool.num_idle == 16 * len(told)
