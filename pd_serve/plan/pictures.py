"""Which pictures a study is worth: attainment over rate, distributions of one load, use and queues over time, goodput by split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pd_serve.bench.statistics import Slo
from pd_serve.plan import plots
from pd_serve.plan.candidates import Candidate
from pd_serve.plan.curve import Curve, Trial
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.protocol.link import Role

MOST_LINES = 8
"""In one picture: more are not told apart."""
_LEAST_RATE = 0.02
"""Of the highest goodput: what bisection looks at below is of no interest."""


def curve_pictures(curves: Sequence[Curve]) -> dict[str, bytes]:
    """Of a search: PNG by a short name. The best fleets come first. Raises BenchError without matplotlib."""
    drawn: dict[str, bytes] = {}
    shown = [curve for curve in curves if curve.trials][:MOST_LINES]
    if shown:
        least = _LEAST_RATE * max(curve.goodput(ATTAINMENTS[0]) for curve in shown)
        points = {
            curve.candidate.name: [(trial.rate, trial.attainment) for trial in curve.trials if trial.rate >= least] for curve in shown
        }
        series = {name: found for name, found in points.items() if found}
        drawn["goodput"] = plots.over_rate(
            series, ATTAINMENTS, "Requests within both limits over offered rate", "offered requests per second"
        )
    for degrees, family in _by_degrees(curves).items():
        if len(family) > 1:
            title = f"Goodput at {ATTAINMENTS[0]:.0%} per GPU{f', {degrees}' if degrees else ''}, requests/s"
            drawn[f"splits-{degrees.replace(' ', '').replace('/', '-')}" if degrees else "splits"] = _splits(family, title)
    return drawn


def load_pictures(trials: Mapping[str, Trial], slo: Slo) -> dict[str, bytes]:
    """Of some fleets at one load, by name. Raises BenchError without matplotlib."""
    drawn: dict[str, bytes] = {}
    for name, title, limit_s in (("ttft", "Time to first token", slo.ttft_s), ("itl", "Gaps between tokens", slo.itl_s)):
        series = {fleet: _ms(trial.series[name]) for fleet, trial in trials.items() if trial.series.get(name)}
        if series:
            drawn[name] = plots.share_above(series, 1e3 * limit_s, title, "milliseconds")
    for prefix, title, ylabel, highest in (
        ("use.", "Workers in steps", "% of the time", 103.0),
        ("queue.", "Requests that wait", "requests", 0.0),
    ):
        scale = 100.0 if highest else 1.0
        series = {
            f"{fleet} {name.removeprefix(prefix)}": tuple((at_s, scale * value) for at_s, value in points)
            for fleet, trial in trials.items()
            for name, points in trial.series.items()
            if name.startswith(prefix)
        }
        if series:
            drawn[prefix.removesuffix(".")] = plots.over_time(series, f"{title} over time", ylabel, highest)
    return drawn


def write_pictures(drawn: Mapping[str, bytes], folder: Path) -> tuple[Path, ...]:
    """One PNG each. Raises PlanError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in drawn.items():
            (folder / f"{name}.png").write_bytes(data)
    except OSError as error:
        raise PlanError(f"cannot write into {folder}: {error.strerror}") from error
    return tuple(folder / f"{name}.png" for name in drawn)


def _splits(family: Sequence[Curve], title: str) -> bytes:
    values = {_place(curve.candidate): curve.per_gpu(ATTAINMENTS[0]) for curve in family}
    return plots.heat_map(values, title, "prefill workers", "decode workers")


def _by_degrees(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Disaggregated ones, by the words for their TP degrees: empty where there is one GPU a worker."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        if curve.candidate.is_disaggregated:
            degrees = curve.candidate.degrees()
            words = f"tp {'/'.join(map(str, degrees))}" if max(degrees) > 1 else ""
            found.setdefault(words, []).append(curve)
    return found


def _place(candidate: Candidate) -> tuple[int, int]:
    return candidate.count(Role.PREFILL), candidate.count(Role.DECODE)


def _ms(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((1e3 * value, share) for value, share in points)
