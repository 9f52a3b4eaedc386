"""The index of who has which block says what a set per worker would, and costs what is asked of it and no more."""

from __future__ import annotations

import random

import pytest

from pd_serve.ids import PeerId
from pd_serve.protocol.cache_events import CacheEvents
from router import holders as module
from router.chains import GivenChain
from router.holders import Holders
from router.prefixes import EXPECTED_S, CachedTokens, Prefixes
from tests.fakes import peer_id

SIZE = 16
PROMPTS = tuple(tuple(range(100 * first, 100 * first + 12)) for first in (1, 2))
"""Digests of two prompts that share nothing."""


class _Plain:
    """A set and what is expected, per worker."""

    def __init__(self) -> None:
        self.known: dict[PeerId, set[int]] = {}
        self.expected: dict[PeerId, dict[int, float]] = {}

    def tokens(self, peer: PeerId, keys: tuple[int, ...], now: float) -> int:
        known, expected = self.known.get(peer, set()), self.expected.get(peer, {})
        depth = 0
        while depth < len(keys) and (keys[depth] in known or expected.get(keys[depth], now) > now):
            depth += 1
        return min(depth, len(keys) - 1) * SIZE


def packed(keys: set[int] | tuple[int, ...]) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)


def differs(seed: int) -> str:
    """What the index says otherwise over random events; empty: nothing. Look-ups are kept, as those of prompts that wait."""
    rng, now, plain = random.Random(seed), [0.0], _Plain()
    prefixes = Prefixes(lambda: now[0])
    seqs: dict[PeerId, int] = {}
    peers = [peer_id(f"w{index}") for index in range(12)]
    kept: list[tuple[tuple[int, ...], CachedTokens]] = []
    for number in range(150):
        now[0] += rng.choice((0.0, 0.5, EXPECTED_S / 3))
        peer, keys = rng.choice(peers), rng.choice(PROMPTS)
        some = {key for key in keys[: rng.randrange(13)] if rng.random() < 0.9}
        action = rng.randrange(7)
        if peer not in seqs or action == 0:
            prefixes.linked(peer, SIZE)
            prefixes.apply(peer, CacheEvents(0, packed(some), num_parts=1))
            seqs[peer], plain.known[peer], plain.expected[peer] = 0, some, {}
        elif action == 1:
            prefixes.forget(peer)
            del seqs[peer], plain.known[peer], plain.expected[peer]
        elif action in (2, 3):
            new, gone = (some - plain.known[peer], set()) if rng.random() < 0.6 else (set(), some & plain.known[peer])
            seqs[peer] += 1
            assert not prefixes.apply(peer, CacheEvents(seqs[peer], packed(new), packed(gone)))
            plain.known[peer] = (plain.known[peer] | new) - gone
            for key in new | gone:
                plain.expected[peer].pop(key, None)
        elif action == 4:
            assert prefixes.apply(peer, CacheEvents(seqs[peer] + 2, b"")), "a gap"
            prefixes.apply(peer, CacheEvents(9, packed(some), num_parts=1))
            seqs[peer], plain.known[peer] = 9, some
            for key in some:
                plain.expected[peer].pop(key, None)
        elif action == 5:
            cached = prefixes.cached_keys(keys, len(keys) * SIZE)
            cached.most()
            cached.expect_at((peer,))
            plain.expected[peer].update({key: now[0] + EXPECTED_S for key in keys if key not in plain.known[peer]})
        kept = [*kept, (keys, prefixes.cached_keys(keys, len(keys) * SIZE))][-4:]
        prefixes._holders.changed(0, SIZE, is_empty=not prefixes._holders.by_block_size.get(SIZE, 0) & 1)  # time passed: look again
        for of, cached in kept:
            said = [cached.get(each, 0) for each in peers]
            expected = [plain.tokens(each, of, now[0]) for each in peers]
            if said != expected:
                return f"seed {seed}, event {number}: {said} instead of {expected}"
            if cached.column(tuple(peers)).tolist() != expected:
                return f"seed {seed}, event {number}: the column is {cached.column(tuple(peers))} instead of {expected}"
        if prefixes.num_blocks != sum(map(len, plain.known.values())):
            return f"seed {seed}, event {number}: {prefixes.num_blocks} blocks"
    for peer in list(seqs):
        prefixes.forget(peer)
    prefixes.linked(peer_id("last"), SIZE)
    prefixes.apply(peer_id("last"), CacheEvents(0, b"", num_parts=1))
    for seq in range(1, 200):
        prefixes.apply(peer_id("last"), CacheEvents(seq, b"", packed((7,))))  # with each, a piece of what is gone is cleared away
    prefixes.forget(peer_id("last"))
    return "" if not prefixes._holders._known and not prefixes._holders._expected else f"seed {seed}: something is left"


@pytest.mark.parametrize("cleared_at_once", [3, 4096])
def test_index_says_what_sets_would(cleared_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLEARED_AT_ONCE", cleared_at_once)
    assert [difference for seed in range(25) if (difference := differs(seed))] == []


@pytest.mark.parametrize("planted", ["slots are used again at once", "changes go unnoticed"])
def test_a_careless_index_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted == "changes go unnoticed":
        monkeypatch.setattr(Holders, "changed_since", lambda self, version: -1 if version < 0 else 0)
    else:
        real = Holders.retire

        def retire(self: Holders, slot: int, block_size: int, known: set[int]) -> None:
            real(self, slot, block_size, set())

        monkeypatch.setattr(Holders, "retire", retire)
    assert any(differs(seed) for seed in range(25))


class Counting(dict[int, int]):
    """Who has what; counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_gets = 0

    def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
        self.num_gets += 1
        return super().get(key, default)


def test_looking_up_takes_time_in_blocks_and_not_in_workers_and_again_in_what_has_changed() -> None:
    prefixes, keys = Prefixes(lambda: 0.0), PROMPTS[0]
    prefixes._holders._known = known = Counting()
    for index in range(500):
        prefixes.linked(peer_id(f"w{index}"), SIZE)
        prefixes.apply(peer_id(f"w{index}"), CacheEvents(0, packed(keys[: 2 + index % 7]), num_parts=1))
    cached = prefixes.cached_keys(keys, 200)
    known.num_gets = 0
    assert cached.most() == 8 * SIZE
    assert known.num_gets == 9
    known.num_gets = 0
    prefixes.apply(peer_id("w0"), CacheEvents(1, packed((5, 6))))
    known.num_gets = 0
    assert cached.get(peer_id("w0")) == 2 * SIZE
    assert known.num_gets == 3, "what one worker told is looked up for that one"


def test_where_nobody_reads_what_is_cached_blocks_are_counted_and_no_more() -> None:
    prefixes, peer = Prefixes(lambda: 0.0, is_read=False), peer_id("w")
    prefixes.linked(peer, SIZE)
    prefixes.apply(peer, CacheEvents(0, packed((1, 2, 3)), part=0, num_parts=2))
    prefixes.apply(peer, CacheEvents(1, packed((7,)), packed((2,))))
    prefixes.apply(peer, CacheEvents(1, packed((4, 7)), part=1, num_parts=2))
    assert prefixes.num_blocks == 4, "named twice, there once"
    prefixes.apply(peer, CacheEvents(2, packed((8, 9)), packed((1,))))
    assert prefixes.num_blocks_of(peer) == 5
    assert not prefixes._caches[peer].known
    assert not prefixes._holders._known
    assert not prefixes.cached_keys((1, 2, 3), 100)
    assert prefixes.apply(peer, CacheEvents(4, b"")), "a gap"
    assert prefixes.num_blocks == 0


def test_digests_that_are_given_are_as_good_as_tokens() -> None:
    chain = GivenChain(PROMPTS[0], 40).of(SIZE)
    assert (chain.keys[:2], chain.max_cached_blocks, chain.extend()) == ([100, 101], 2, False)
