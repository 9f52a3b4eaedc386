"""Coefficients of step times from measurements: relative least squares with coefficients from 0 up, and how far off they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np

from pd_serve.bench.errors import BenchError

MAX_QUANTILES = 201


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """value = sum of coefficient x term, for each case."""

    coefficients: tuple[float, ...]
    r2: float
    """1 - residuals' by values' squared deviation, of the cases; 1.0 where they are all the same."""
    worst: float
    """Largest relative residual of a case."""

    def value(self, terms: Sequence[float]) -> float:
        return sum(coefficient * term for coefficient, term in zip(self.coefficients, terms, strict=True))


def fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> Fitted:
    """Minimizes the sum of ((fitted - value) / value)^2 with no coefficient below 0; `terms`: a row for each value. Exact: the best of all
    choices of which coefficients are 0. Raises BenchError when there are fewer cases than coefficients, or values that are no times.
    """
    rows, measured = np.asarray(terms, float), np.asarray(values, float)
    if rows.ndim != 2 or len(rows) < rows.shape[1]:
        raise BenchError(f"{len(values)} cases are too few to fit {rows.shape[-1] if rows.ndim == 2 else 'some'} coefficients")
    if not np.all(np.isfinite(measured)) or np.any(measured <= 0):
        raise BenchError("a time that is not above 0 cannot be fitted")
    relative = rows / measured[:, None]
    best, best_error = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            part = relative[:, chosen]
            # Columns differ by ten orders of magnitude: scaled, or what is small is taken for noise.
            scale = np.abs(part).max(axis=0)
            scale[scale == 0] = 1.0
            found = np.linalg.lstsq(part / scale, np.ones(len(part)), rcond=None)[0] / scale
            error = float(np.sum((part @ found - 1) ** 2))
            if np.all(found >= 0) and error < best_error - 1e-15:
                best, best_error = np.zeros(rows.shape[1]), error
                best[list(chosen)] = found
    residuals = rows @ best - measured
    spread = float(np.sum((measured - measured.mean()) ** 2))
    r2 = 1 - float(np.sum(residuals**2)) / spread if spread > 0 else 1.0
    return Fitted(tuple(best.tolist()), r2, float(np.max(np.abs(residuals / measured))))


def quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    """At even distances from the least to the most; of few values as many as there are."""
    if not ratios:
        return ()
    shares = np.linspace(0, 1, min(len(ratios), MAX_QUANTILES))
    return tuple(np.quantile(np.asarray(ratios, float), shares).tolist())
