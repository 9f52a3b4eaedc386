"""Metrics of several processes of one router as those of one: a scrape reaches one process, and means all. Pure; used by router/api/ops.py.

Counters, histograms and gauges add up; what every process sees of the same workers does not (SAME_EVERYWHERE: the most is taken).
Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterable

SAME_EVERYWHERE = frozenset(
    {
        "pd_serve_linked_workers",
        "pd_serve_open_requests",
        "pd_serve_queued_requests",
        "pd_serve_prefix_known_blocks",
        "pd_serve_breaker_state",
    }
)


def summed(expositions: Iterable[str]) -> str:
    """One exposition of all; families in the order in which they first appear, comments as they first appear."""
    families: dict[str, _Family] = {}
    for text in expositions:
        family = _Family("")
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                if line.startswith("# HELP ") or name not in families:
                    family = families.setdefault(name, _Family(name))
                family.comment(line)
            elif line:
                family.add(line)
    return "".join(family.text() for family in families.values())


class _Family:
    def __init__(self, name: str) -> None:
        self._takes_most = name in SAME_EVERYWHERE
        self._comments: dict[str, None] = {}
        self._values: dict[str, float] = {}

    def comment(self, line: str) -> None:
        self._comments[line] = None

    def add(self, line: str) -> None:
        series, _, number = line.rpartition(" ")
        value, before = float(number), self._values.get(series)
        if before is None:
            self._values[series] = value
        elif series.partition("{")[0].endswith("_created"):
            self._values[series] = min(before, value)
        else:
            self._values[series] = max(before, value) if self._takes_most else before + value

    def text(self) -> str:
        lines = [*self._comments, *(f"{series} {value!r}" for series, value in self._values.items())]
        return "".join(f"{line}\n" for line in lines)
