"""Two results side by side: ratios of their figures, and what else was not the same. Pure but for the reading of results elsewhere."""

from __future__ import annotations

import msgspec

from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import LIMIT_CORES, differs
from pd_serve.bench.results import Config, ConfigDifference, Result, diff_config


class Row(msgspec.Struct, frozen=True):
    arm: str
    """`A` where both sides have it, else `A : B`."""
    figure: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        """b / a; nan where a is 0 and b is not."""
        if self.a:
            return self.b / self.a
        return 1.0 if not self.b else float("nan")


class Comparison(msgspec.Struct, frozen=True):
    rows: tuple[Row, ...]
    differences: tuple[ConfigDifference, ...]
    """Of parameters and effective settings."""


def compare_results(a: Result, b: Result, limit_cores: float = LIMIT_CORES, force: bool = False) -> Comparison:
    """Arms of one name, or the only arm of each. Raises BenchError when they cannot be compared, or should not be (`force`: are anyway)."""
    if a.kind != b.kind:
        raise BenchError(f"one is a result of bench {a.kind}, the other of bench {b.kind}")
    reason = differs(a.load, b.load, limit_cores)
    if reason is not None and not force:
        raise BenchError(f"not compared: {reason} (--force compares all the same)")
    pairs = [(name, name) for name in a.arms if name in b.arms]
    if not pairs and len(a.arms) == len(b.arms) == 1:
        pairs = [(next(iter(a.arms)), next(iter(b.arms)))]
    if not pairs:
        raise BenchError(f"no arm is in both: {', '.join(a.arms)} against {', '.join(b.arms)}")
    rows = [row for one, other in pairs for row in _rows(one, a, other, b)]
    machine = {"machine": msgspec.to_builtins(a.machine)}, {"machine": msgspec.to_builtins(b.machine)}
    settings = (
        {**machine[0], "parameters": a.parameters, **a.config},
        {**machine[1], "parameters": b.parameters, **b.config},
    )
    return Comparison(tuple(rows), diff_config(*settings))


def compare_arms(result: Result) -> Comparison:
    """The first arm against each of the others: they shared the minute. Raises BenchError for a result of one arm."""
    first, *others = result.arms
    if not others:
        raise BenchError(f"one arm alone: {first}; name a second result, or measure with several arms")
    rows = [row for other in others for row in _rows(first, result, other, result)]
    differences: dict[tuple[str, str], ConfigDifference] = {}
    mine = _of_arm(result.config, first)
    for other in others:
        for difference in diff_config(mine, _of_arm(result.config, other)):
            differences.setdefault((difference.process, difference.key), difference)
    return Comparison(tuple(rows), tuple(differences.values()))


def _rows(one: str, a: Result, other: str, b: Result) -> list[Row]:
    mine, theirs = a.arms[one].figures, b.arms[other].figures
    label = one if one == other else f"{one} : {other}"
    return [Row(label, name, value, theirs[name]) for name, value in mine.items() if name in theirs]


def _of_arm(config: Config, arm: str) -> Config:
    """Settings of that arm's processes, by their own names. Arms of a sweep are called `NAME LOAD`."""
    prefix = f"{arm.partition(' ')[0]}/"
    return {name.removeprefix(prefix): values for name, values in config.items() if name.startswith(prefix)}
