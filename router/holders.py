"""Which workers have a block: for each short digest a bit set of slots, one slot per worker whose cache is known. Kept by prefixes.py.

A prompt's digests are walked once for all workers: those that have the next block stay, the others are done. A worker of which nothing is
known any more gives up its slot at once and takes another; its old bits are cleared away piece by piece, and the slot is used again when
that is done.

A digest that one worker has costs an entry of a dict: its bit set is the worker's own.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
import numpy.typing as npt

from router.chains import AnyChain

CLEARED_AT_ONCE = 4096
"""Digests of workers that are gone, with each change: no long turn of the event loop."""
_FEW = 8
"""Bits that are quicker looked at one by one."""


class Holders:
    """new_slot -> put, remove, expect, unexpect, changed ... -> retire."""

    def __init__(self) -> None:
        self.version = 0
        """Grows whenever a look-up may give something else."""
        self.slots_version = 0
        """Grows whenever a slot is another worker's."""
        self.num_slots = 0
        self.by_block_size: dict[int, int] = {}
        """Slots of which anything is known or expected."""
        self._known: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._changed: dict[int, int] = {}
        """Version at which each slot last changed, the latest last."""
        self._free: list[int] = []
        self._retired: deque[tuple[int, set[int]]] = deque()

    def new_slot(self) -> int:
        self.slots_version += 1
        if self._free:
            return heapq.heappop(self._free)
        self.num_slots += 1
        return self.num_slots - 1

    def retire(self, slot: int, block_size: int, known: set[int]) -> None:
        """Nothing is known there any more of what was; nothing is expected there. Takes over the set."""
        self.changed(slot, block_size, is_empty=True)
        self._retired.append((slot, known))

    def changed(self, slot: int, block_size: int, is_empty: bool) -> None:
        """What is known or expected there. `is_empty`: nothing."""
        self.version += 1
        self._changed.pop(slot, None)
        self._changed[slot] = self.version
        among = self.by_block_size.get(block_size, 0)
        self.by_block_size[block_size] = among & ~(1 << slot) if is_empty else among | 1 << slot
        if self._retired:
            self._clear()

    def changed_since(self, version: int) -> int:
        """Slots, as a bit set; -1: all, for -1."""
        if version < 0:
            return -1
        slots = 0
        for slot, changed_at in reversed(self._changed.items()):
            if changed_at <= version:
                break
            slots |= 1 << slot
        return slots

    def put(self, key: int, bit: int) -> None:
        held_by = self._known.setdefault(key, bit)
        if held_by is not bit:
            self._known[key] = held_by | bit

    def remove(self, key: int, bit: int) -> None:
        _drop(self._known, key, bit)

    def expect(self, key: int, bit: int) -> None:
        self._expected[key] = self._expected.get(key, 0) | bit

    def unexpect(self, key: int, bit: int) -> None:
        _drop(self._expected, key, bit)

    def walk(self, chain: AnyChain, block_size: int, among: int, found: dict[int, int]) -> None:
        """Adds to `found` which of these slots have exactly so many tokens, at least one of the prompt left to compute."""
        known, expected, keys, most = self._known, self._expected, chain.keys, chain.max_cached_blocks
        depth = 0
        while among and (depth < len(keys) or chain.extend()):
            key = keys[depth]
            held_by = known.get(key, 0)
            if expected:
                held_by |= expected.get(key, 0)
            left = among & held_by
            if left != among:
                _note(found, min(depth, most) * block_size, among ^ left)
                among = left
            depth += 1
        _note(found, min(depth, most) * block_size, among)

    def _clear(self) -> None:
        """A piece of what is left of slots that were given up."""
        slot, known = self._retired[0]
        bit = 1 << slot
        for _ in range(min(len(known), CLEARED_AT_ONCE)):
            _drop(self._known, known.pop(), bit)
        if not known:
            self._retired.popleft()
            heapq.heappush(self._free, slot)


def column_of(found: dict[int, int], num_slots: int) -> npt.NDArray[np.int64]:
    """Tokens by slot, and a 0 behind the last for workers that have none."""
    tokens = np.zeros(num_slots + 1, np.int64)
    for num_tokens, held_by in found.items():
        if held_by.bit_count() > _FEW:
            bits = np.frombuffer(held_by.to_bytes(-(-num_slots // 8), "little"), np.uint8)
            tokens[:-1][np.unpackbits(bits, count=num_slots, bitorder="little").view(np.bool_)] = num_tokens
            continue
        while held_by:
            lowest = held_by & -held_by
            tokens[lowest.bit_length() - 1] = num_tokens
            held_by ^= lowest
    return tokens


def _note(found: dict[int, int], num_tokens: int, slots: int) -> None:
    if num_tokens and slots:
        found[num_tokens] = found.get(num_tokens, 0) | slots


def _drop(holders: dict[int, int], key: int, bit: int) -> None:
    held_by = holders.get(key, 0)
    if held_by & bit:
        if held_by == bit:
            del holders[key]
        else:
            holders[key] = held_by ^ bit
