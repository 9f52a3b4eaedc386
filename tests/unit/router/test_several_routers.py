"""Several routers before the same workers: each knows by the workers' events, so as much is found in the caches as with one router.

Conversations of many turns, each turn at whichever router the balancer picks. A turn goes where it is done first, by the tokens that each
worker was given to compute so far (routers are told: that is not what this is about) and those of this turn; events arrive requests late.
"""

from __future__ import annotations

import random

import pytest

from pd_serve.ids import LinkId, PeerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.cache_events import CacheEvents
from router.prefixes import Prefixes
from tests.fakes import peer_id
from workers.cache_feed import CacheFeed

SIZE = 16
NUM_WORKERS, NUM_BLOCKS = 4, 400
NUM_SESSIONS, NUM_TURNS, TURN_TOKENS = 60, 6, 80
REPORT_EVERY = 4
"""Requests between two reports of a worker."""


def requests(rng: random.Random) -> list[tuple[int, ...]]:
    """The turns of all sessions, mixed; each goes on from the one before, behind a system prompt that all share."""
    system = tuple(range(64))
    turns = [session for session in range(NUM_SESSIONS) for _ in range(NUM_TURNS)]
    rng.shuffle(turns)
    said = dict.fromkeys(range(NUM_SESSIONS), system)
    made: list[tuple[int, ...]] = []
    for session in turns:
        said[session] += tuple(rng.randrange(50_000) for _ in range(TURN_TOKENS))
        made.append(said[session])
    return made


def hit_rate(num_routers: int, seed: int, hears_others: bool = True) -> float:
    """Share of all prompt tokens that the worker found in its cache. `hears_others` False: a router knows only what it sent itself."""
    rng, balancer = random.Random(seed), random.Random(seed + 1)
    pools: dict[PeerId, BlockPool] = {peer_id(f"w{index}"): BlockPool(NUM_BLOCKS, SIZE) for index in range(NUM_WORKERS)}
    feeds = {peer: CacheFeed(pool.prefixes) for peer, pool in pools.items()}
    routers = [Prefixes(lambda: 0.0) for _ in range(num_routers)]
    sent = dict.fromkeys(pools, 0)
    for index, router in enumerate(routers):
        for peer in pools:
            router.linked(peer, SIZE)
            feeds[peer].opened(LinkId(index))
    num_found = num_tokens = 0
    for number, tokens in enumerate(requests(rng)):
        router = routers[balancer.randrange(num_routers)]
        cached = router.cached(tokens)
        peer = min(pools, key=lambda peer: sent[peer] + len(tokens) - cached.get(peer, 0))
        sent[peer] += len(tokens) - cached.get(peer, 0)
        cached.expect_at((peer,))
        num_found += serve(pools[peer], tokens)
        num_tokens += len(tokens)
        if number % REPORT_EVERY == 0 and hears_others:
            report(feeds, routers)
    return num_found / num_tokens


def serve(pool: BlockPool, tokens: tuple[int, ...]) -> int:
    """As a worker does. Tokens found in its cache."""
    matched = pool.match_prefix(tokens)
    blocks = matched + pool.allocate(pool.num_blocks_for(len(tokens)) - len(matched))
    pool.publish(tokens, blocks, len(tokens))
    pool.release(blocks)
    return len(matched) * SIZE


def report(feeds: dict[PeerId, CacheFeed], routers: list[Prefixes]) -> None:
    for peer, feed in feeds.items():
        for action in feed.frames():
            assert isinstance(action.frame, CacheEvents)
            assert not routers[action.link_id].apply(peer, action.frame)


@pytest.mark.parametrize("seed", range(3))
def test_four_routers_find_as_much_as_one(seed: int) -> None:
    one, four = hit_rate(1, seed), hit_rate(4, seed)
    assert one > 0.5
    assert abs(four - one) < 0.03, (one, four)


def test_routers_that_do_not_hear_of_each_others_requests_find_less() -> None:
    assert hit_rate(4, 0, hears_others=False) < hit_rate(4, 0) - 0.1
