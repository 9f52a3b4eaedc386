"""Values in buckets whose bounds grow by a constant factor: any quantile within 1 % of the exact one, in memory that does not grow with
what is added. Source: DDSketch (Masson, Rim and Lee, VLDB 2019), here with a fixed range and buckets that are never merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

from pd_serve.bench.statistics import Summary

ACCURACY = 0.005
"""Relative error of a value that is told: half of what is promised, so that rounding has room."""
LEAST, MOST = 1e-7, 1e7
"""Seconds; what lies outside is told as the least or the most that was added."""
_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_PER_LOG = 1 / math.log(_GROWTH)
_NUM_BUCKETS = math.ceil(math.log(MOST / LEAST) * _PER_LOG) + 1


class Histogram:
    """add(value, count) ... then percentile(q). Count, sum, least and most are exact."""

    __slots__ = ("_counts", "count", "least", "most", "total")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        """Bucket i: above LEAST _GROWTH^(i-1), up to LEAST _GROWTH^i; the first takes what is smaller."""
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """`value` from 0 up, so many times."""
        if count <= 0:
            return
        place = math.ceil(math.log(value / LEAST) * _PER_LOG) if value > LEAST else 0
        self._counts[min(place, _NUM_BUCKETS - 1)] += count
        self.count += count
        self.total += value * count
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def percentile(self, q: float) -> float:
        """`q` from 0 to 100; linear between the two nearest ranks, as bench/statistics.py; 0.0 of none."""
        if not self.count:
            return 0.0
        place = (self.count - 1) * q / 100
        rank = math.floor(place)
        low, high = self._at_rank(rank), self._at_rank(min(rank + 1, self.count - 1))
        return low + (place - rank) * (high - low)

    def share_up_to(self, value: float) -> float:
        """Share of what was added that is at most `value`, which itself may be off by a bucket."""
        if not self.count:
            return 0.0
        place = math.ceil(math.log(value / LEAST) * _PER_LOG) if value > LEAST else 0
        return sum(self._counts[: place + 1]) / self.count

    def summary(self) -> Summary:
        if not self.count:
            return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99, p999 = (self.percentile(q) for q in (50, 90, 99, 99.9))
        return Summary(self.count, self.total / self.count, p50, p90, p99, p999, self.most)

    def curve(self) -> Iterator[tuple[float, float]]:
        """(value, share of what was added that is above it), for each bucket that has any: a picture of the tail."""
        above = self.count
        for place, count in enumerate(self._counts):
            if count:
                yield self._value(place), above / self.count
                above -= count

    def _at_rank(self, rank: int) -> float:
        """Of ranks from 0."""
        if rank == 0:
            return self.least
        if rank == self.count - 1:
            return self.most
        place = next(place for place, below in enumerate(accumulate(self._counts)) if below > rank)
        return self._value(place)

    def _value(self, place: int) -> float:
        """In the middle of the bucket, as far as relative errors go, but never beyond what was added."""
        value = LEAST * _GROWTH**place * 2 / (1 + _GROWTH)
        return min(max(value, self.least), self.most)
