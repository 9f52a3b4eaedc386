"""What the router knows of the workers' prefix caches, from their own events alone: how much of a prompt each need not compute. Pure.

Every router hears the same events, so several in front of the same workers know the same without speaking to each other. Per worker
(incarnation) there is the set of short digests of its published blocks, kept by the rules of protocol/cache_events.py:

    linked -> waiting for the snapshot -> snapshot part 0 -> events in order ...        a gap: nothing is known, back to waiting

A prompt that was sent to a worker is expected there before its events tell: for a few seconds its digests count as known, so that requests
which come together with one new prefix stay together. Wrong knowledge costs time, never an answer: workers look into their own caches.

Owned by the event loop's thread. Looking up hashes a prompt once per block size and one block further than anybody has it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TypeVar, overload

from pd_serve.ids import PeerId
from pd_serve.kv.prefix_chain import chain_digests
from pd_serve.protocol.cache_events import CacheEvents

EXPECTED_S = 10.0
"""Longest time between the choice of a worker and its event: a prompt begins within about a step, and is published chunk by chunk."""
MAX_EXPECTED_BLOCKS = 1024
"""Of one prompt beyond what is known: hashing more for a guess is not worth its time. Within them, prompts are told apart anyway."""
MAX_EXPECTED_PER_WORKER = 1 << 16
MAX_BLOCKS_PER_WORKER = 1 << 20
"""Blocks beyond these are not known of: some 100 MB."""
ASK_AGAIN_S = 5.0
"""Seconds without the snapshot that was asked for."""

T = TypeVar("T")

_key_of = struct.Struct("=Q").unpack_from
"""The first 8 bytes of a digest as a number, as memoryview.cast reads them."""


class Prefixes:
    """linked -> apply ... -> forget, for each worker; cached() for each prompt."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._caches: dict[PeerId, _Cache] = {}
        self.version = 0
        """Grows whenever a look-up may give something else."""

    @property
    def num_blocks(self) -> int:
        """Known of all workers together."""
        return sum(len(cache.known) for cache in self._caches.values())

    def num_blocks_of(self, peer: PeerId) -> int:
        cache = self._caches.get(peer)
        return 0 if cache is None else len(cache.known)

    def linked(self, peer: PeerId, block_size: int) -> None:
        """A link is up; the worker's snapshot follows unasked."""
        self._caches[peer] = _Cache(block_size, self._now())
        self.version += 1

    def forget(self, peer: PeerId) -> None:
        """The worker is gone. Idempotent; takes the time that its blocks take."""
        if self._caches.pop(peer, None) is not None:
            self.version += 1

    def apply(self, peer: PeerId, events: CacheEvents) -> bool:
        """Take in what a worker tells; of a peer that is not linked: dropped. True: something was missed, ask it for a snapshot."""
        cache = self._caches.get(peer)
        if cache is None:
            return False
        self.version += 1
        return not cache.apply(events, self._now())

    def cached(self, token_ids: tuple[int, ...]) -> CachedTokens:
        """Of one prompt, for as long as it waits. Nothing is hashed before it is read."""
        return CachedTokens(self, token_ids)

    def match(self, chains: Chains) -> dict[PeerId, int]:
        """Tokens that each worker has, at least one of the prompt left to compute. Workers without any are left out."""
        now = self._now()
        cached: dict[PeerId, int] = {}
        for peer, cache in self._caches.items():
            if cache.known or cache.expected:
                chain = chains.of(cache.block_size)
                num_blocks = min(cache.depth(chain, now), chain.max_cached_blocks)
                if num_blocks:
                    cached[peer] = num_blocks * cache.block_size
        return cached

    def expect(self, chains: Chains, peers: Iterable[PeerId]) -> None:
        """The prompt was sent to these workers."""
        until = self._now() + EXPECTED_S
        for peer in peers:
            cache = self._caches.get(peer)
            if cache is not None:
                cache.expect(chains.of(cache.block_size), until)
        self.version += 1


class CachedTokens(Mapping[PeerId, int]):
    """Tokens of one prompt that each worker need not compute, by what is known when it is read; looked up anew when that has changed."""

    def __init__(self, prefixes: Prefixes, token_ids: tuple[int, ...]) -> None:
        self._prefixes = prefixes
        self._chains = Chains(token_ids)
        self._version = -1
        self._tokens: dict[PeerId, int] = {}

    def __getitem__(self, peer: PeerId) -> int:
        return self._current()[peer]

    @overload
    def get(self, peer: PeerId, /) -> int | None: ...
    @overload
    def get(self, peer: PeerId, /, default: int | T) -> int | T: ...
    def get(self, peer: PeerId, /, default: int | T | None = None) -> int | T | None:
        """Most workers have nothing of most prompts: without an exception for each."""
        return self._current().get(peer, default)

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def expect_at(self, peers: Iterable[PeerId]) -> None:
        """The prompt was sent there. Where nobody asks what is cached, nobody needs to know either: then nothing is done."""
        if self._version >= 0:
            self._prefixes.expect(self._chains, peers)

    def _current(self) -> dict[PeerId, int]:
        if self._version != self._prefixes.version:
            self._tokens = self._prefixes.match(self._chains)
            self._version = self._prefixes.version
        return self._tokens


class Chains:
    """The digests of one prompt, by block size, as far as somebody wanted to know."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._chains: dict[int, Chain] = {}

    def of(self, block_size: int) -> Chain:
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = Chain(self._token_ids, block_size)
        return chain


class Chain:
    """Short digests of a prompt's full blocks, hashed one by one."""

    def __init__(self, token_ids: tuple[int, ...], block_size: int) -> None:
        self.max_cached_blocks = max(0, len(token_ids) - 1) // block_size
        """One token at least is computed."""
        self.keys: list[int] = []
        self._digests = chain_digests(token_ids, block_size, 0, len(token_ids) // block_size)

    def extend(self) -> bool:
        """Hash one block more. False: there is none."""
        digest = next(self._digests, None)
        if digest is None:
            return False
        self.keys.append(_key_of(digest)[0])
        return True


class _Cache:
    """One worker's."""

    def __init__(self, block_size: int, linked_at: float) -> None:
        self.block_size = block_size
        self.known: set[int] = set()
        self.expected: dict[int, float] = {}
        """Until when; the soonest first."""
        self._seq: int | None = None
        """Of the last frame taken in; None: waiting for a snapshot."""
        self._next_part = 0
        self._asked_at = linked_at

    def apply(self, events: CacheEvents, now: float) -> bool:
        """False: something was missed, and all that was known is void."""
        is_first_part = events.is_snapshot and events.part == 0
        if self._seq is None and not is_first_part and now - self._asked_at < ASK_AGAIN_S:
            return True
        if not is_first_part and not self._follows(events):
            self.known = set()
            self._seq = None
            self._asked_at = now
            return False
        if is_first_part:
            self.known = set()
        if events.is_snapshot:
            self._next_part = events.part + 1
        self._seq = events.seq
        self._take(events)
        self._drop_expired(now)
        return True

    def depth(self, chain: Chain, now: float) -> int:
        """Blocks from the beginning of a prompt that are here."""
        known, expected, keys = self.known, self.expected, chain.keys
        depth = len(list(takewhile(known.__contains__, keys)))
        while depth < len(keys) or chain.extend():
            key = keys[depth]
            if key not in known and expected.get(key, now) <= now:
                break
            depth += 1
        return depth

    def expect(self, chain: Chain, until: float) -> None:
        for _ in range(MAX_EXPECTED_BLOCKS):
            if not chain.extend():
                break
        for key in chain.keys:
            if key not in self.known:
                self.expected.pop(key, None)
                self.expected[key] = until
        while len(self.expected) > MAX_EXPECTED_PER_WORKER:
            del self.expected[next(iter(self.expected))]

    def _follows(self, events: CacheEvents) -> bool:
        if self._seq is None:
            return False
        return (events.seq, events.part) == (self._seq, self._next_part) if events.is_snapshot else events.seq == self._seq + 1

    def _take(self, events: CacheEvents) -> None:
        stored, removed = memoryview(events.stored).cast("Q"), memoryview(events.removed).cast("Q")
        self.known.difference_update(removed)
        self.known.update(stored[: MAX_BLOCKS_PER_WORKER - len(self.known)])
        if self.expected:
            for key in (*stored, *removed):
                self.expected.pop(key, None)

    def _drop_expired(self, now: float) -> None:
        while self.expected:
            key = next(iter(self.expected))
            if self.expected[key] > now:
                break
            del self.expected[key]
