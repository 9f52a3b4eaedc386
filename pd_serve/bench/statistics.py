"""What the records say, in numbers. Pure. Every figure is defined here and nowhere else:

TTFT  arrival of a request's first token, less the moment it was sent.
ITL   gap between two tokens of a request that arrived one after the other; all gaps of all requests are one set.
TPOT  of a request with at least two tokens: (last arrival - first arrival) / (tokens - 1).
E2E   arrival of the last token, less the moment the request was sent.
Only requests that were answered whole count; the others are in num_failed (num_rejected among them: status 429 or 503).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from pd_serve.bench.records import RequestRecord

SLO_GAP_SHARE = 0.99
"""Share of a request's gaps that must keep an ITL limit."""
_REJECTIONS = (429, 503)


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `count` values; the rest is 0 where there is none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float

    def figures(self, name: str) -> dict[str, float]:
        """`name.p50` and so on, for an ArmResult."""
        if not self.count:
            return {}
        values = {"mean": self.mean, "p50": self.p50, "p90": self.p90, "p99": self.p99, "p999": self.p999, "max": self.max}
        return {f"{name}.{key}": value for key, value in values.items()}


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits in seconds; 0: none."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    """99 % of the request's own gaps are at most this (SLO_GAP_SHARE)."""
    tpot_s: float = 0.0

    @property
    def is_set(self) -> bool:
        return bool(self.ttft_s or self.itl_s or self.tpot_s)


class Goodput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    attainment: float
    """Share of all requests sent, failed ones included, that kept every limit."""
    requests_per_s: float
    """Those requests, by the duration of the run."""


class Offered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an open loop asked of the server, against its plan."""

    planned_rate: float
    """(requests - 1) / time between the first and the last planned; of several rounds, both added up."""
    achieved_rate: float
    """The same of the moments they were sent."""
    late: Summary
    """Seconds by which requests were sent after their time."""


class LoadFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set of requests, summed up."""

    num_requests: int
    num_failed: int
    num_rejected: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft: Summary
    itl: Summary
    tpot: Summary
    e2e: Summary
    hit_rate: float | None
    """Cached prompt tokens by prompt tokens; None: the server does not say."""

    def figures(self) -> dict[str, float]:
        """Flat names, for an ArmResult."""
        out: dict[str, float] = {
            "requests": self.num_requests,
            "failed": self.num_failed,
            "rejected": self.num_rejected,
            "duration_s": self.duration_s,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
        }
        for name, summary in (("ttft_s", self.ttft), ("itl_s", self.itl), ("tpot_s", self.tpot), ("e2e_s", self.e2e)):
            out |= summary.figures(name)
        if self.hit_rate is not None:
            out["prefix_hit_rate"] = self.hit_rate
        return out


def percentile(values: Sequence[float], q: float) -> float:
    """`q` from 0 to 100, of values in any order; 0.0 of none.

    Linear between the two nearest ranks: h = (n - 1) q / 100, and x[floor h] + (h - floor h) (x[ceil h] - x[floor h]).
    Source: Hyndman and Fan 1996, definition 7, numpy's default.
    """
    return _percentile(sorted(values), q)


def summarize(values: Iterable[float]) -> Summary:
    ordered = sorted(values)
    if not ordered:
        return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99, p999 = (_percentile(ordered, q) for q in (50, 90, 99, 99.9))
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, p999, ordered[-1])


def ttft(records: Iterable[RequestRecord]) -> list[float]:
    return [record.token_s[0] - record.sent_s for record in records if record.ok and record.token_s]


def itl(records: Iterable[RequestRecord]) -> list[float]:
    return [gap for record in records if record.ok for gap in gaps(record)]


def tpot(records: Iterable[RequestRecord]) -> list[float]:
    return [_tpot(record) for record in records if record.ok and len(record.token_s) > 1]


def e2e(records: Iterable[RequestRecord]) -> list[float]:
    return [record.token_s[-1] - record.sent_s for record in records if record.ok and record.token_s]


def gaps(record: RequestRecord) -> list[float]:
    """Between the arrivals of one request."""
    return [after - before for before, after in pairwise(record.token_s)]


def duration(records: Iterable[RequestRecord]) -> float:
    """From the first request sent to the last token of any; 0.0 of none."""
    records = list(records)
    if not records:
        return 0.0
    return max(max(record.token_s, default=record.sent_s) for record in records) - min(record.sent_s for record in records)


def tokens_per_s(records: Iterable[RequestRecord], duration_s: float | None = None) -> float:
    """Arrivals of every request, whole or not, by the duration (by default that of the records)."""
    records = list(records)
    seconds = duration(records) if duration_s is None else duration_s
    return _by(sum(len(record.token_s) for record in records), seconds)


def goodput(records: Iterable[RequestRecord], slo: Slo, duration_s: float | None = None) -> Goodput:
    records = list(records)
    seconds = duration(records) if duration_s is None else duration_s
    num_good = sum(attains(record, slo) for record in records)
    return Goodput(_by(num_good, len(records)), _by(num_good, seconds))


def attains(record: RequestRecord, slo: Slo) -> bool:
    """Whole, and within every limit that is set."""
    if not record.ok or not record.token_s:
        return False
    if slo.ttft_s and record.token_s[0] - record.sent_s > slo.ttft_s:
        return False
    if slo.tpot_s and len(record.token_s) > 1 and _tpot(record) > slo.tpot_s:
        return False
    between = gaps(record)
    return not (slo.itl_s and between and sum(gap <= slo.itl_s for gap in between) < SLO_GAP_SHARE * len(between))


def rate_at_attainment(points: Iterable[tuple[float, float]], share: float) -> float:
    """Of (rate, attainment) pairs of a sweep: the highest rate up to which every rate kept `share`; 0.0 when not even the lowest did."""
    best = 0.0
    for rate, attainment in sorted(points):
        if attainment < share:
            break
        best = rate
    return best


def offered(*rounds: Iterable[RequestRecord]) -> Offered:
    """Of one or several rounds: the time between two of them is nobody's."""
    parts = [list(part) for part in rounds]
    planned = [[record.planned_s for record in part] for part in parts]
    sent = [[record.sent_s for record in part] for part in parts]
    late = summarize(max(0.0, record.sent_s - record.planned_s) for part in parts for record in part)
    return Offered(_rate(planned), _rate(sent), late)


def load_figures(records: Iterable[RequestRecord], duration_s: float | None = None) -> LoadFigures:
    """`duration_s`: of the measurement, where it is not that of the records (several rounds in turn with another arm)."""
    records = list(records)
    seconds = duration(records) if duration_s is None else duration_s
    whole = [record for record in records if record.ok]
    telling = [record for record in whole if record.num_cached_tokens >= 0]
    num_prompt = sum(record.num_prompt_tokens for record in telling)
    return LoadFigures(
        num_requests=len(records),
        num_failed=len(records) - len(whole),
        num_rejected=sum(record.status in _REJECTIONS for record in records),
        duration_s=seconds,
        requests_per_s=_by(len(whole), seconds),
        output_tokens_per_s=tokens_per_s(records, seconds),
        prompt_tokens_per_s=_by(sum(record.num_prompt_tokens for record in whole), seconds),
        ttft=summarize(ttft(records)),
        itl=summarize(itl(records)),
        tpot=summarize(tpot(records)),
        e2e=summarize(e2e(records)),
        hit_rate=sum(record.num_cached_tokens for record in telling) / num_prompt if num_prompt else None,
    )


def _tpot(record: RequestRecord) -> float:
    return (record.token_s[-1] - record.token_s[0]) / (len(record.token_s) - 1)


def _percentile(ordered: Sequence[float], q: float) -> float:
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _rate(rounds: Sequence[Sequence[float]]) -> float:
    filled = [moments for moments in rounds if moments]
    return _by(sum(len(moments) - 1 for moments in filled), sum(max(moments) - min(moments) for moments in filled))


def _by(value: float, divisor: float) -> float:
    return value / divisor if divisor > 0 else 0.0
