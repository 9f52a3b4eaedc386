"""What the router knows of the workers' prefix caches, from their own events alone: how much of a prompt each need not compute. Pure.

Every router hears the same events, so several in front of the same workers know the same without speaking to each other. Per worker
(incarnation) there is the set of short digests of its published blocks, kept by the rules of protocol/cache_events.py:

    linked -> waiting for the snapshot -> snapshot part 0 -> events in order ...        a gap: nothing is known, back to waiting

and for each digest there is the set of workers that have it (holders.py), so that a look-up walks a prompt's digests once for all workers.

A prompt that was sent to a worker is expected there before its events tell: for a few seconds its digests count as known, so that requests
which come together with one new prefix stay together. Wrong knowledge costs time, never an answer: workers look into their own caches.

Owned by the event loop's thread. Looking up hashes a prompt once per block size and one block further than anybody has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from pd_serve.ids import PeerId
from pd_serve.kv.prefix_chain import SHORT_NBYTES
from pd_serve.protocol.cache_events import CacheEvents
from router.chains import AnyChain, AnyChains, Chains, GivenChain
from router.holders import Holders, column_of

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


class Prefixes:
    """linked -> apply ... -> forget, for each worker; cached() for each prompt."""

    def __init__(self, now: Callable[[], float], is_read: bool = True) -> None:
        """`is_read` False: nobody asks what is cached. Then blocks are counted and no more."""
        self._now = now
        self._is_read = is_read
        self._holders = Holders()
        self._caches: dict[PeerId, _Cache] = {}
        self._expecting: deque[tuple[float, PeerId]] = deque()
        """Until when something may be expected of whom, the soonest first."""
        self._peers: tuple[PeerId, ...] = ()
        self._slots: tuple[int, npt.NDArray[np.intp]] = (-1, np.zeros(0, np.intp))
        """Of `_peers`, and the version of the holders' slots for which that is right."""

    @property
    def num_blocks(self) -> int:
        """Known of all workers together."""
        return sum(cache.num_blocks for cache in self._caches.values())

    def num_blocks_of(self, peer: PeerId) -> int:
        cache = self._caches.get(peer)
        return 0 if cache is None else cache.num_blocks

    def linked(self, peer: PeerId, block_size: int) -> None:
        """A link is up; the worker's snapshot follows unasked."""
        self.forget(peer)
        self._caches[peer] = _Cache(self._holders, self._is_read, block_size, self._now())

    def forget(self, peer: PeerId) -> None:
        """The worker is gone. Idempotent."""
        cache = self._caches.pop(peer, None)
        if cache is not None:
            cache.gone()

    def apply(self, peer: PeerId, events: CacheEvents) -> bool:
        """Take in what a worker tells; of a peer that is not linked: dropped. True: something was missed, ask it for a snapshot."""
        cache = self._caches.get(peer)
        return cache is not None and not cache.apply(events, self._now())

    def cached(self, token_ids: tuple[int, ...]) -> CachedTokens:
        """Of one prompt, for as long as it waits. Nothing is hashed before it is read."""
        return CachedTokens(self, Chains(token_ids))

    def cached_keys(self, keys: Sequence[int], num_tokens: int) -> CachedTokens:
        """Of a prompt of so many tokens whose digests are given, by whoever knows no tokens: one per block of all workers' block size."""
        return CachedTokens(self, GivenChain(keys, num_tokens))

    def look_up(self, chains: AnyChains, cached: dict[int, int], since: int) -> int:
        """Bring `cached` up to date, which is what it was after change `since` (-1: empty): the holders of exactly so many tokens, at least
        one of the prompt left to compute. Returns the number of the last change. Takes time in the blocks that those of which something
        has changed have, and in how many have changed.
        """
        now, holders = self._now(), self._holders
        while self._expecting and self._expecting[0][0] <= now:
            cache = self._caches.get(self._expecting.popleft()[1])
            if cache is not None:
                cache.drop_expired(now)
        changed = holders.changed_since(since)
        if since >= 0 and changed:
            for num_tokens, held_by in list(cached.items()):
                if rest := held_by & ~changed:
                    cached[num_tokens] = rest
                else:
                    del cached[num_tokens]
        for block_size, among in holders.by_block_size.items():
            among &= changed
            if among:
                holders.walk(chains.of(block_size), block_size, among, cached)
        return holders.version

    def expect(self, chains: AnyChains, peers: Iterable[PeerId]) -> None:
        """The prompt was sent to these workers."""
        until = self._now() + EXPECTED_S
        for peer in peers:
            cache = self._caches.get(peer)
            if cache is not None:
                cache.expect(chains.of(cache.block_size), until)
                self._expecting.append((until, peer))

    @property
    def version(self) -> int:
        """Grows whenever a look-up may give something else."""
        return self._holders.version

    def tokens_of(self, peer: PeerId, cached: dict[int, int]) -> int:
        """Out of what look_up() has found."""
        cache = self._caches.get(peer)
        if cache is not None:
            bit = cache.bit
            for num_tokens, held_by in cached.items():
                if held_by & bit:
                    return num_tokens
        return 0

    def peers_in(self, held_by: int) -> list[PeerId]:
        return [peer for peer, cache in self._caches.items() if cache.bit & held_by]

    def column(self, peers: tuple[PeerId, ...], cached: dict[int, int]) -> npt.NDArray[np.int64]:
        """tokens_of() each of them. The same tuple as at the last call is not looked at again while workers stay."""
        holders = self._holders
        if peers is not self._peers or self._slots[0] != holders.slots_version:
            self._peers = peers
            slots = [-1 if (cache := self._caches.get(peer)) is None else cache.slot for peer in peers]
            self._slots = holders.slots_version, np.array(slots, np.intp)
        return column_of(cached, holders.num_slots)[self._slots[1]]


class CachedTokens(Mapping[PeerId, int]):
    """Tokens of one prompt that each worker need not compute, by what is known when it is read; looked up anew when that has changed."""

    def __init__(self, prefixes: Prefixes, chains: AnyChains) -> None:
        self._prefixes = prefixes
        self._chains = chains
        self._version = -1
        self._tokens: dict[int, int] = {}

    def __getitem__(self, peer: PeerId) -> int:
        if tokens := self.get(peer, 0):
            return tokens
        raise KeyError(peer)

    @overload
    def get(self, peer: PeerId, /) -> int | None: ...
    @overload
    def get(self, peer: PeerId, /, default: int | T) -> int | T: ...
    def get(self, peer: PeerId, /, default: int | T | None = None) -> int | T | None:
        """Most workers have nothing of most prompts: without an exception for each."""
        return self._prefixes.tokens_of(peer, self._current()) or default

    def __iter__(self) -> Iterator[PeerId]:
        held_by = 0
        for each in self._current().values():
            held_by |= each
        return iter(self._prefixes.peers_in(held_by))

    def __len__(self) -> int:
        return sum(held_by.bit_count() for held_by in self._current().values())

    def __bool__(self) -> bool:
        return bool(self._current())

    def most(self) -> int:
        """That any worker has."""
        return max(self._current(), default=0)

    def column(self, peers: tuple[PeerId, ...]) -> npt.NDArray[np.int64]:
        """Of these workers."""
        return self._prefixes.column(peers, self._current())

    def expect_at(self, peers: Iterable[PeerId]) -> None:
        """The prompt was sent there. Where nobody asks what is cached, nobody needs to know either: then nothing is done."""
        if self._version >= 0:
            self._prefixes.expect(self._chains, peers)

    def _current(self) -> dict[int, int]:
        if self._version != self._prefixes.version:
            self._version = self._prefixes.look_up(self._chains, self._tokens, self._version)
        return self._tokens


class _Cache:
    """One worker's."""

    def __init__(self, holders: Holders, is_read: bool, block_size: int, linked_at: float) -> None:
        self.block_size = block_size
        self.known: set[int] = set()
        self.expected: dict[int, float] = {}
        """Until when; the soonest first."""
        self.slot = holders.new_slot()
        self.bit = 1 << self.slot
        self._holders = holders
        self._is_read = is_read
        self._num_counted: int | None = None
        """Blocks, where nobody reads which, once the snapshot is complete: until then a part may name one that a change has named."""
        self._seq: int | None = None
        """Of the last frame taken in; None: waiting for a snapshot."""
        self._next_part = 0
        self._asked_at = linked_at

    @property
    def num_blocks(self) -> int:
        return len(self.known) if self._num_counted is None else self._num_counted

    def apply(self, events: CacheEvents, now: float) -> bool:
        """False: something was missed, and all that was known is void."""
        is_first_part = events.is_snapshot and events.part == 0
        if self._seq is None and not is_first_part and now - self._asked_at < ASK_AGAIN_S:
            return True
        if not is_first_part and not self._follows(events):
            self._void()
            self._seq = None
            self._asked_at = now
            return False
        if is_first_part:
            self._void()
        if events.is_snapshot:
            self._next_part = events.part + 1
        self._seq = events.seq
        if not self._is_read:
            self._count(events)
        elif events.stored or events.removed:
            self._take(events)
        self.drop_expired(now)
        return True

    def expect(self, chain: AnyChain, until: float) -> None:
        if not self._is_read:
            return
        for _ in range(MAX_EXPECTED_BLOCKS):
            if not chain.extend():
                break
        for key in chain.keys:
            if key not in self.known:
                if self.expected.pop(key, None) is None:
                    self._holders.expect(key, self.bit)
                self.expected[key] = until
        while len(self.expected) > MAX_EXPECTED_PER_WORKER:
            self._unexpect(next(iter(self.expected)))
        self._changed()

    def drop_expired(self, now: float) -> None:
        before = len(self.expected)
        while self.expected:
            key = next(iter(self.expected))
            if self.expected[key] > now:
                break
            self._unexpect(key)
        if len(self.expected) < before:
            self._changed()

    def gone(self) -> None:
        for key in tuple(self.expected):
            self._unexpect(key)
        self._holders.retire(self.slot, self.block_size, self.known)

    def _void(self) -> None:
        """What was known; what is expected stays."""
        self._num_counted = None
        if self.known:
            expected = self.expected
            for key in expected:
                self._holders.unexpect(key, self.bit)
            self._holders.retire(self.slot, self.block_size, self.known)
            self.known, self.slot = set(), self._holders.new_slot()
            self.bit = 1 << self.slot
            for key in expected:
                self._holders.expect(key, self.bit)
            self._changed()

    def _follows(self, events: CacheEvents) -> bool:
        if self._seq is None:
            return False
        return (events.seq, events.part) == (self._seq, self._next_part) if events.is_snapshot else events.seq == self._seq + 1

    def _take(self, events: CacheEvents) -> None:
        stored, removed = memoryview(events.stored).cast("Q"), memoryview(events.removed).cast("Q")
        known, bit, put, remove = self.known, self.bit, self._holders.put, self._holders.remove
        for key in removed:
            if key in known:
                known.remove(key)
                remove(key, bit)
        for key in stored[: MAX_BLOCKS_PER_WORKER - len(known)]:
            if key not in known:
                known.add(key)
                put(key, bit)
        if self.expected:
            for key in (*stored, *removed):
                if key in self.expected:
                    self._unexpect(key)
        self._changed()

    def _count(self, events: CacheEvents) -> None:
        if self._num_counted is not None:
            self._num_counted += (len(events.stored) - len(events.removed)) // SHORT_NBYTES
            self._num_counted = min(MAX_BLOCKS_PER_WORKER, max(0, self._num_counted))
            return
        self.known.difference_update(memoryview(events.removed).cast("Q"))
        self.known.update(memoryview(events.stored).cast("Q")[: MAX_BLOCKS_PER_WORKER - len(self.known)])
        if events.is_snapshot and events.part == events.num_parts - 1:
            self._num_counted, self.known = len(self.known), set()

    def _unexpect(self, key: int) -> None:
        del self.expected[key]
        self._holders.unexpect(key, self.bit)

    def _changed(self) -> None:
        self._holders.changed(self.slot, self.block_size, is_empty=not self.known and not self.expected)
