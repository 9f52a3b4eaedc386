"""Who holds which KV block. Pure, single-threaded: owned by the worker's machine, on the control thread.

A block is free, held (reference count > 0) or cached (count 0, content published under its prefix). What must stay true:

    free + cached + held = total;  a block is never in two of them;  a cached block is never handed out by allocate() before it is evicted
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_serve.errors import NoCapacityError
from pd_serve.kv.free_runs import FreeRuns
from pd_serve.kv.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class PoolCounts:
    total: int
    free: int
    cached: int
    """Held by the prefix cache alone."""
    held: int
    """Reference count above 0: by sequences, leases and transfers."""


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        self.num_total = num_blocks
        self.block_size = block_size
        self._prefix_cache = prefix_cache
        self._free = FreeRuns(num_blocks)
        self._refs: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.prefixes = PrefixIndex(block_size)
        """Changed by the pool alone; others may follow it."""

    @property
    def num_allocatable(self) -> int:
        return len(self._free) + len(self._cached)

    def counts(self) -> PoolCounts:
        return PoolCounts(total=self.num_total, free=len(self._free), cached=len(self._cached), held=len(self._refs))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def ref_count(self, block: int) -> int:
        return self._refs.get(block, 0)

    def allocate(self, count: int, after: int | None = None) -> tuple[int, ...]:
        """`count` blocks with reference count 1, in runs as long as can be had, preferably right behind block `after`.

        Evicts least recently used cached blocks only when free ones do not suffice. Raises NoCapacityError, and then changes nothing.
        """
        if count > self.num_allocatable:
            raise NoCapacityError(f"{count} blocks asked for, {self.num_allocatable} of {self.num_total} can be had")
        missing = count - len(self._free)
        if missing > 0:
            evicted = [self._cached.popitem(last=False)[0] for _ in range(missing)]
            for block in evicted:
                self.prefixes.forget(block)
            self._free.put(evicted)
        blocks = self._free.take(count, after)
        for block in blocks:
            self._refs[block] = 1
        return tuple(blocks)

    def retain(self, blocks: Iterable[int]) -> None:
        """One more holder of each block. Precondition: each is held or cached."""
        for block in blocks:
            refs = self._refs.get(block, 0)
            if refs == 0:
                assert block in self._cached, f"block {block} is free"
                del self._cached[block]
            self._refs[block] = refs + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. At 0 a published block becomes cached (a sequence's last block is evicted first), another one free."""
        freed: list[int] = []
        for block in reversed(blocks):
            refs = self._refs.get(block, 0)
            assert refs > 0, f"block {block} is not held"
            if refs > 1:
                self._refs[block] = refs - 1
                continue
            del self._refs[block]
            if self.prefixes.is_published(block):
                self._cached[block] = None
            else:
                self.prefixes.forget(block)
                freed.append(block)
        if freed:
            self._free.put(freed)

    def match_prefix(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Published blocks of the longest known prefix that leaves at least one token to compute; the caller now holds them."""
        if not self._prefix_cache or not len(self.prefixes):
            return ()
        blocks = self.prefixes.find(token_ids, (len(token_ids) - 1) // self.block_size)
        self.retain(blocks)
        return blocks

    def publish(self, token_ids: Sequence[int], blocks: Sequence[int], num_computed_tokens: int) -> None:
        """Make the full blocks among the first `num_computed_tokens` tokens of a sequence findable. Precondition: the caller holds them,
        and their KV is in memory. Cheap when called again: only new blocks are hashed."""
        if self._prefix_cache:
            self.prefixes.add(token_ids, blocks, num_computed_tokens // self.block_size)

    def drop_cache(self) -> None:
        """Forget everything published; held blocks stay held."""
        freed = list(self._cached)
        self._cached.clear()
        for block in freed:
            self.prefixes.forget(block)
        for block in self._refs:
            self.prefixes.forget(block)
        self._free.put(freed)

    def check(self) -> None:
        """Raises AssertionError when conservation is broken. For tests and the idle check of drain; linear in the pool."""
        free = self._free.blocks()
        seen = set(free) | set(self._cached) | set(self._refs)
        total = len(free) + len(self._cached) + len(self._refs)
        assert total == len(seen) == self.num_total, f"{total} blocks in three states, {len(seen)} distinct, {self.num_total} in the pool"
        assert all(refs > 0 for refs in self._refs.values())
        assert all(self.prefixes.is_published(block) for block in self._cached)
