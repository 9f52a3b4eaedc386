"""Free blocks as runs of consecutive ids, so that an allocation is few large ranges of memory. Pure; owned by the BlockPool.

Two sorted lists over the same runs (by start, by length) make every operation a bisection; the moves inside the lists are memmoves of
pointers, microseconds at 100,000 blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeRuns:
    """A set of block ids, taken out in runs as long as can be had and put back merged with their neighbours."""

    def __init__(self, num_blocks: int) -> None:
        self._starts: list[int] = []
        self._length: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._num_free = 0
        if num_blocks:
            self._insert(0, num_blocks)
            self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    @property
    def num_runs(self) -> int:
        return len(self._starts)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove and return `count` free blocks: those right after block `after` first, then the smallest run that holds the rest,
        else the longest runs there are. Precondition: count <= len(self)."""
        assert count <= self._num_free
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            self._take_from(after + 1, count, taken)
        while len(taken) < count:
            rest = count - len(taken)
            index = bisect_left(self._by_length, (rest, -1))
            _, start = self._by_length[index] if index < len(self._by_length) else self._by_length[-1]
            self._take_from(start, rest, taken)
        self._num_free -= count
        return taken

    def put(self, blocks: Iterable[int]) -> None:
        """Add blocks, none of which may be free already."""
        ordered = sorted(blocks)
        self._num_free += len(ordered)
        begin = 0
        for index in range(1, len(ordered) + 1):
            if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
                self._merge(ordered[begin], index - begin)
                begin = index

    def blocks(self) -> list[int]:
        """All free blocks, ascending."""
        return [block for start in self._starts for block in range(start, start + self._length[start])]

    def _take_from(self, start: int, count: int, taken: list[int]) -> None:
        """Cut at most `count` blocks off the front of the run at `start`."""
        length = self._length[start]
        used = min(count, length)
        self._remove(start)
        if used < length:
            self._insert(start + used, length - used)
        taken.extend(range(start, start + used))

    def _merge(self, start: int, length: int) -> None:
        index = bisect_left(self._starts, start)
        if index < len(self._starts):
            following = self._starts[index]
            assert following >= start + length, "block freed twice"
            if following == start + length:
                length += self._length[following]
                self._remove(following)
        if index > 0:
            previous = self._starts[index - 1]
            end = previous + self._length[previous]
            assert end <= start, "block freed twice"
            if end == start:
                length += self._length[previous]
                self._remove(previous)
                start = previous
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length[start] = length
        insort(self._by_length, (length, start))

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
