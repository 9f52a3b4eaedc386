"""Quantiles of a stream of numbers without keeping them, and how long answers become. Pure; used by overload.py and fair.py's callers.

Source: R. Jain, I. Chlamtac, "The P-square algorithm for dynamic calculation of quantiles and histograms without storing observations",
Communications of the ACM 28(10), 1985: five markers, whose heights follow a parabola through their neighbours.
"""

from __future__ import annotations

from bisect import bisect_right, insort

LEVELS = (0.5, 0.9, 0.99)
WINDOW = 512
"""Answers after which what was learned begins to be forgotten: traffic changes."""
FEW = 16
"""Answers below which their lengths say too little."""


class Quantile:
    """add() numbers; value() is their quantile `p`, exact up to five of them."""

    __slots__ = ("_desired", "_heights", "_increments", "_positions", "num")

    def __init__(self, p: float) -> None:
        self.num = 0
        self._heights: list[float] = []
        self._positions = [0.0, 1.0, 2.0, 3.0, 4.0]
        self._increments = (0.0, p / 2, p, (1 + p) / 2, 1.0)
        self._desired = [4 * increment for increment in self._increments]

    def add(self, x: float) -> None:
        self.num += 1
        heights, positions = self._heights, self._positions
        if self.num <= 5:
            insort(heights, x)
            return
        heights[0], heights[4] = min(x, heights[0]), max(x, heights[4])
        cell = min(4, max(1, bisect_right(heights, x)))
        for index in range(cell, 5):
            positions[index] += 1
        for index in range(5):
            self._desired[index] += self._increments[index]
        for index in (1, 2, 3):
            gap = self._desired[index] - positions[index]
            if (gap >= 1 and positions[index + 1] - positions[index] > 1) or (gap <= -1 and positions[index - 1] - positions[index] < -1):
                self._move(index, 1 if gap > 0 else -1)

    def value(self) -> float:
        """0 before anything was added."""
        if self.num > 5:
            return self._heights[2]
        return self._heights[min(self.num - 1, int(self._increments[2] * self.num))] if self.num else 0.0

    def _move(self, index: int, step: int) -> None:
        """The paper's equation (P2), or the line to that neighbour where the parabola would leave the order."""
        q, n = self._heights, self._positions
        parabola = q[index] + step / (n[index + 1] - n[index - 1]) * (
            (n[index] - n[index - 1] + step) * (q[index + 1] - q[index]) / (n[index + 1] - n[index])
            + (n[index + 1] - n[index] - step) * (q[index] - q[index - 1]) / (n[index] - n[index - 1])
        )
        if not q[index - 1] < parabola < q[index + 1]:
            parabola = q[index] + step * (q[index + step] - q[index]) / (n[index + step] - n[index])
        q[index] = parabola
        n[index] += step


class Lengths:
    """Of answers, in tokens: mean and LEVELS of the last WINDOW to twice as many."""

    def __init__(self) -> None:
        self._old: tuple[Quantile, ...] = ()
        self._old_mean = 0.0
        self._new = _fresh()
        self._sum = 0.0

    @property
    def num(self) -> int:
        return (self._old[0].num if self._old else 0) + self._new[0].num

    def add(self, num_tokens: int) -> None:
        for quantile in self._new:
            quantile.add(num_tokens)
        self._sum += num_tokens
        if (num := self._new[0].num) >= WINDOW:
            self._old, self._old_mean = self._new, self._sum / num
            self._new, self._sum = _fresh(), 0.0

    def mean(self) -> float:
        """0: no answer has ended."""
        num = self._new[0].num
        if self._old and num < WINDOW // 2:
            return self._old_mean
        return self._sum / num if num else 0.0

    def levels(self) -> tuple[float, ...]:
        """Ascending."""
        known = self._old if self._old and self._new[0].num < WINDOW // 2 else self._new
        return tuple([quantile.value() for quantile in known])


def _fresh() -> tuple[Quantile, ...]:
    return tuple([Quantile(level) for level in LEVELS])


class LengthsByTenant:
    """What a tenant's answers are like; what all are like, while too few of its own have ended."""

    def __init__(self) -> None:
        self._all = Lengths()
        self._by_tenant: dict[str, Lengths] = {}

    def add(self, tenant: str, num_tokens: int) -> None:
        """The number of tenants is that of the configuration."""
        self._all.add(num_tokens)
        self._by_tenant.setdefault(tenant, Lengths()).add(num_tokens)

    def of(self, tenant: str) -> Lengths:
        own = self._by_tenant.get(tenant)
        return own if own is not None and own.num >= FEW else self._all
