"""Which pictures a result is worth: distributions and timelines of arms that kept their records, curves over the rate of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pd_serve.bench import plots
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.results import Result, read_records
from pd_serve.bench.statistics import gaps, itl, ttft

OVER_RATE = (
    ("goodput_requests_per_s", "Goodput over offered rate", "requests per second within the limits"),
    ("slo_attainment", "Attainment over offered rate", "share of requests within the limits"),
    ("ttft_s.p99", "TTFT p99 over offered rate", "milliseconds"),
    ("tpot_s.p99", "TPOT p99 over offered rate", "milliseconds"),
    ("output_tokens_per_s", "Output tokens over offered rate", "tokens per second"),
)


def pictures(path: Path, result: Result) -> dict[str, bytes]:
    """PNG by a short name. `path` is the result's, beside which its records lie. Raises BenchError."""
    records = {name: found for name, arm in result.arms.items() if (found := read_records(path, arm))}
    drawn = _distributions(records) if records else {}
    return drawn | _timelines(result, records) | _over_rate(result)


def _distributions(records: dict[str, list[RequestRecord]]) -> dict[str, bytes]:
    series = {f"{name}{suffix}": some for name, found in records.items() for suffix, some in _by_kind(found)}
    drawn = {"ttft": plots.cdf({name: _ms(ttft(some)) for name, some in series.items()}, "Time to first token", "milliseconds")}
    between = {name: _ms(itl(some)) for name, some in series.items()}
    if any(between.values()):
        drawn["itl"] = plots.cdf(between, "Gaps between tokens", "milliseconds")
    return drawn


def _timelines(result: Result, records: dict[str, list[RequestRecord]]) -> dict[str, bytes]:
    """One for each load of a sweep: arms of one load share it, whatever they are called."""
    by_load: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, found in records.items():
        arm = str(result.arms[name].parameters.get("arm", name))
        load = name.removeprefix(arm).strip()
        for suffix, some in _by_kind(found):
            if moments := _timeline(some):
                by_load.setdefault(load, {})[f"{arm}{suffix}"] = moments
    drawn: dict[str, bytes] = {}
    for load, series in by_load.items():
        title = f"Gaps between tokens as they came{f', {load}' if load else ''}; line: the longest of its moment"
        drawn[f"timeline-{load}" if load else "timeline"] = plots.timeline(series, title, "milliseconds")
    return drawn


def _by_kind(records: Sequence[RequestRecord]) -> list[tuple[str, list[RequestRecord]]]:
    """Kinds apart, where there are several."""
    kinds = sorted({record.kind for record in records})
    return [(f" {kind}" if len(kinds) > 1 else "", [record for record in records if record.kind == kind]) for kind in kinds]


def _timeline(records: Sequence[RequestRecord]) -> list[tuple[float, float]]:
    return sorted((moment, 1e3 * gap) for record in records for moment, gap in zip(record.token_s[1:], gaps(record), strict=True))


def _over_rate(result: Result) -> dict[str, bytes]:
    drawn: dict[str, bytes] = {}
    for figure, title, ylabel in OVER_RATE:
        scale = 1e3 if ylabel == "milliseconds" else 1.0
        curves: dict[str, list[tuple[float, float]]] = {}
        for arm in result.arms.values():
            name, rate = arm.parameters.get("arm"), arm.figures.get("offered_requests_per_s")
            if isinstance(name, str) and rate is not None and figure in arm.figures:
                curves.setdefault(name, []).append((rate, scale * arm.figures[figure]))
        if any(len(points) > 1 for points in curves.values()):
            drawn[f"over-rate-{figure.partition('.')[0]}"] = plots.lines(curves, title, "offered requests per second", ylabel)
    return drawn


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]
