"""How long a decode step takes with so many sequences in it, as the router sees it from the pace of whole answers: nothing is done per
token. Used by decode_forecast.py. What workers compute of prompts per second is measured by throughput.py.
"""

from __future__ import annotations

_KEEP = 0.97
"""What an answer keeps of its weight with every one that follows: the last some dozens count."""
_MIN_WEIGHT = 3.0
"""Answers before anything is believed."""
_LEAST_SPREAD = 0.25
"""Variance of the batch below which a slope would be noise."""


class StepTime:
    """Least squares over (sequences, seconds per step) with forgetting."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, batch: float, seconds: float) -> None:
        self._weight = self._weight * _KEEP + 1.0
        self._x = self._x * _KEEP + batch
        self._y = self._y * _KEEP + seconds
        self._xx = self._xx * _KEEP + batch * batch
        self._xy = self._xy * _KEEP + batch * seconds

    def __call__(self, batch: float) -> float:
        """Seconds; 0: not known. Never less for a larger batch; at batches alike so far, that of those."""
        if self._weight < _MIN_WEIGHT:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        slope = max(0.0, (self._xy / self._weight - x * y) / spread) if spread > _LEAST_SPREAD else 0.0
        slope = min(slope, y / x) if x > 0 else slope
        return y + slope * (batch - x)
