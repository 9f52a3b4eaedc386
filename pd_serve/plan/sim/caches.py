"""One worker's KV pool: what sequences hold of it, and the blocks of prompts that can be found there again, least recently used forgotten.

    capacity = held by sequences + idle in the cache + free          what a new sequence may take: all but what is held

Blocks are those of the requests' keys (PlannedRequest.block_keys), each `block_tokens` long: a block of a prompt has a key once it is
computed, and then one holder for each sequence that uses it; without holders it is idle until its memory is wanted. Two sequences that
compute the same block at the same time both keep theirs, as in pd_serve/kv/block_pool.py; the first one's is found by others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Holding:
    """What one sequence holds: blocks that others can find, by their keys, and tokens of its own."""

    __slots__ = ("keys", "num_own", "num_published")

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys
        self.num_own = 0
        self.num_published = len(keys)
        """Of its prompt's blocks: those behind are yet to be offered to others."""


class KVPool:
    """match -> hold -> publish ... grow -> release. Counts are tokens."""

    def __init__(self, capacity: int, block_tokens: int, is_told: bool) -> None:
        """`is_told`: somebody reads what is stored and removed (changes())."""
        self.capacity = capacity
        self.num_held = 0
        self.num_idle = 0
        self._block_tokens = block_tokens
        self._is_told = is_told
        self._holders: dict[int, int] = {}
        """By key of every block that can be found; 0: idle."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The one used longest ago first."""
        self._changes: dict[int, bool] = {}
        """Since they were last told: whether a key is stored now."""

    @property
    def num_allocatable(self) -> int:
        return self.capacity - self.num_held

    @property
    def num_free(self) -> int:
        return self.capacity - self.num_held - self.num_idle

    def match(self, keys: Sequence[int], num_tokens: int) -> int:
        """Blocks of a prompt's head that are here; one token at least is left to compute."""
        holders, most = self._holders, min(len(keys), (num_tokens - 1) // self._block_tokens)
        found = 0
        while found < most and keys[found] in holders:
            found += 1
        return found

    def num_to_take(self, keys: Sequence[int], num_blocks: int, num_own: int) -> int:
        """What hold() would take away from num_allocatable."""
        holders = self._holders
        return num_own + self._block_tokens * sum([not holders[key] for key in keys[:num_blocks]])

    def hold(self, keys: Sequence[int], num_blocks: int, num_own: int) -> Holding:
        """The first blocks, which are here, and tokens of its own. Precondition: there is room."""
        holders = self._holders
        kept = list(keys[:num_blocks])
        for key in kept:
            if not holders[key]:
                del self._idle[key]
                self.num_idle -= self._block_tokens
                self.num_held += self._block_tokens
            holders[key] += 1
        holding = Holding(kept)
        self.grow(holding, num_own)
        return holding

    def grow(self, holding: Holding, num_tokens: int) -> None:
        holding.num_own += num_tokens
        self.take(num_tokens)

    def take(self, num_tokens: int) -> None:
        """For sequences that tell by their end which of them had it."""
        self.num_held += num_tokens
        while self.num_idle > self.capacity - self.num_held and self._idle:
            key, _ = self._idle.popitem(last=False)
            self.num_idle -= self._block_tokens
            del self._holders[key]
            self._tell(key, is_stored=False)

    def publish(self, holding: Holding, keys: Sequence[int], num_computed: int) -> None:
        """Of its prompt, so many tokens are computed: whole blocks can be found now. Blocks that somebody else had first stay its own."""
        holders, begin = self._holders, holding.num_published
        end = min(len(keys), num_computed // self._block_tokens)
        for key in keys[begin:end]:
            if key not in holders:
                holders[key] = 1
                holding.keys.append(key)
                holding.num_own -= self._block_tokens
                self._tell(key, is_stored=True)
        holding.num_published = max(begin, end)

    def release(self, holding: Holding, num_grown: int = 0) -> None:
        """All of it, and what it took() besides."""
        holders = self._holders
        self.num_held -= holding.num_own + num_grown
        holding.num_own = 0
        for key in reversed(holding.keys):
            holders[key] -= 1
            if not holders[key]:
                self._idle[key] = None
                self.num_idle += self._block_tokens
                self.num_held -= self._block_tokens
        holding.keys.clear()

    def changes(self) -> tuple[list[int], list[int]]:
        """(keys stored, keys removed) since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def _tell(self, key: int, is_stored: bool) -> None:
        if self._is_told and self._changes.pop(key, is_stored) is is_stored:
            self._changes[key] = is_stored
