"""What became of the requests of a simulation: the figures of bench/statistics.py, under the same names, in memory that does not grow.

Filled by the simulator as requests end; read by search, pictures and the command line. All times are the simulation's.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import msgspec

from pd_serve.bench.statistics import SLO_GAP_SHARE, Slo, Summary
from pd_serve.plan.histogram import Histogram

ATTAINMENTS = (0.90, 0.99)
NO_LIMITS = Slo()


class Served(NamedTuple):
    """A request that was answered whole."""

    at_s: float
    """When it was sent."""
    ttft_s: float
    last_s: float
    """From sending it to its last token."""
    num_prompt: int
    num_cached: int
    """Prompt tokens that were found in a cache."""
    num_output: int
    num_late_gaps: int = 0
    """Gaps between its tokens that were longer than the SLO's."""

    @property
    def tpot_s(self) -> float:
        """0.0 with one token."""
        return (self.last_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else 0.0


class RoleUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of all workers of a role together."""

    busy_s: float
    """Time in steps, all workers added up."""
    present_s: float
    """Time that they were there."""

    @property
    def share(self) -> float:
        return self.busy_s / self.present_s if self.present_s > 0 else 0.0


class OutcomeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Outcome as a file has it."""

    slo: Slo
    num_gpus: int
    figures: dict[str, float]
    """Names as in a result of `pd-serve bench`."""
    rejected: dict[str, int]
    roles: dict[str, RoleUse]


class Outcome:
    """add_request, add_gaps, rejected, failed, add_use as things happen; everything else reads."""

    def __init__(self, slo: Slo = NO_LIMITS, num_gpus: int = 0) -> None:
        """`num_gpus`: what goodput per GPU is divided by; 0: it is not told."""
        self.slo = slo
        self.num_gpus = num_gpus
        self.ttft = Histogram()
        self.itl = Histogram()
        self.tpot = Histogram()
        self.e2e = Histogram()
        self.num_served = 0
        self.num_met = 0
        self.num_failed = 0
        self.rejections: Counter[str] = Counter()
        self.roles: dict[str, RoleUse] = {}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._begin_s = math.inf
        self._end_s = 0.0

    # ---- what happens

    def add_request(self, served: Served) -> bool:
        """Whether it kept every limit."""
        self._seen(served.at_s, served.at_s + served.last_s)
        self.num_served += 1
        self.num_prompt_tokens += served.num_prompt
        self.num_cached_tokens += served.num_cached
        self.num_output_tokens += served.num_output
        self.ttft.add(served.ttft_s)
        self.e2e.add(served.last_s)
        if served.num_output > 1:
            self.tpot.add(served.tpot_s)
        is_met = attains(served, self.slo)
        self.num_met += is_met
        return is_met

    def add_gaps(self, step_s: float, num_tokens: int) -> None:
        """So many tokens came this long after the one before of their request."""
        self.itl.add(step_s, num_tokens)

    def rejected(self, reason: str, at_s: float) -> None:
        """`reason`: as pd_serve_rejections_total names it."""
        self._seen(at_s, at_s)
        self.rejections[reason] += 1

    def failed(self, at_s: float) -> None:
        """It was taken in and not answered whole."""
        self._seen(at_s, at_s)
        self.num_failed += 1

    def add_use(self, role: str, busy_s: float, present_s: float) -> None:
        before = self.roles.get(role, RoleUse(0.0, 0.0))
        self.roles[role] = RoleUse(before.busy_s + busy_s, before.present_s + present_s)

    # ---- what came of it

    @property
    def num_rejected(self) -> int:
        return self.rejections.total()

    @property
    def num_requests(self) -> int:
        """All that were sent."""
        return self.num_served + self.num_failed + self.num_rejected

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last token of any."""
        return max(0.0, self._end_s - self._begin_s) if self.num_requests else 0.0

    @property
    def attainment(self) -> float:
        """Share of all requests sent, rejected and failed ones included, that kept every limit."""
        return self.num_met / self.num_requests if self.num_requests else 0.0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens by prompt tokens."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def goodput_requests_per_s(self) -> float:
        """Requests that kept every limit, by the duration."""
        return self._per_s(self.num_met)

    def goodput(self, attainment: float) -> float:
        """The same where this share of all requests sent kept the limits, else 0.0: the load was too much for that share. The goodput of a
        system is the largest of a sweep over rates. Source: DistServe, OSDI'24, section 2.
        """
        return self.goodput_requests_per_s if self.attainment >= attainment else 0.0

    def utilization(self, role: str) -> float:
        """Share of the time that the role's workers were in steps."""
        return self.roles[role].share if role in self.roles else 0.0

    def figures(self) -> dict[str, float]:
        """Flat names, as LoadFigures.figures."""
        out: dict[str, float] = {
            "requests": self.num_requests,
            "failed": self.num_failed + self.num_rejected,
            "rejected": self.num_rejected,
            "rejected_share": self.num_rejected / self.num_requests if self.num_requests else 0.0,
            "duration_s": self.duration_s,
            "requests_per_s": self._per_s(self.num_served),
            "output_tokens_per_s": self._per_s(self.num_output_tokens),
            "prompt_tokens_per_s": self._per_s(self.num_prompt_tokens),
        }
        for name, summary in self.summaries().items():
            out |= summary.figures(name)
        out |= {"prefix_hit_rate": self.hit_rate, "slo_attainment": self.attainment, "goodput_requests_per_s": self.goodput_requests_per_s}
        if self.num_gpus:
            out["goodput_requests_per_s_per_gpu"] = self.goodput_requests_per_s / self.num_gpus
        for role in sorted(self.roles):
            out[f"utilization_share.{role}"] = self.utilization(role)
        return out

    def summaries(self) -> dict[str, Summary]:
        return {
            "ttft_s": self.ttft.summary(),
            "itl_s": self.itl.summary(),
            "tpot_s": self.tpot.summary(),
            "e2e_s": self.e2e.summary(),
        }

    def to_json(self) -> bytes:
        report = OutcomeReport(self.slo, self.num_gpus, self.figures(), dict(sorted(self.rejections.items())), dict(self.roles))
        return msgspec.json.encode(report)

    def _seen(self, begin_s: float, end_s: float) -> None:
        self._begin_s = min(self._begin_s, begin_s)
        self._end_s = max(self._end_s, end_s)

    def _per_s(self, count: float) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def attains(served: Served, slo: Slo) -> bool:
    """Within every limit that is set; that of gaps as bench/statistics.py says it, for SLO_GAP_SHARE of the request's own."""
    if slo.ttft_s and served.ttft_s > slo.ttft_s:
        return False
    if slo.tpot_s and served.tpot_s > slo.tpot_s:
        return False
    num_gaps = served.num_output - 1
    return not (slo.itl_s and num_gaps > 0 and num_gaps - served.num_late_gaps < SLO_GAP_SHARE * num_gaps)
