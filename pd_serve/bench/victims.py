"""What long prompts do to short streams: the pure part of `bench interference`: who is sent what and when, which gaps count, what they say.

    time     0 ------ lead ------------------------------------------------ end
    victims  | start  | gaps between tokens that both lie in here count     | streams are left
    long              ^        ^        ^        ^        ^   every interval_s

The same requests, at the same moments, go to every arm; without the long ones it is the arm's own baseline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.statistics import gaps, summarize, ttft
from pd_serve.bench.workload import random_tokens

VICTIM, LONG = "victim", "long"
FASTEST_TOKEN_S = 0.003
"""A stream faster than this would run out of plans."""
_STATISTICS = ("mean", "p50", "p90", "p99", "p999", "max")


class VictimsTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is done to an arm in one round."""

    slots: int = 4
    victim_prompt_tokens: int = 16
    victim_tokens: int = 256
    long_tokens: int = 2048
    long_output_tokens: int = 4
    """Few: what they are decoded with is load that any arm has to bear, and not what is looked for."""
    count: int = 5
    interval_s: float = 2.5
    lead_s: float = 2.0
    vocab: int = 32_000
    seed: int = 0

    @property
    def end_s(self) -> float:
        """When the streams are left: an interval after the last long prompt."""
        return self.lead_s + self.count * self.interval_s

    @property
    def window(self) -> Window:
        return Window(self.lead_s, self.end_s)


@dataclass(frozen=True, slots=True)
class Window:
    """Steady state of one run, seconds after its start."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def holds(self, moment: float) -> bool:
        return self.begin_s <= moment <= self.end_s


def make_test(test: VictimsTest) -> list[RequestPlan]:
    """Victims slot by slot (session `slot-0` and so on), more than will be needed; then the long prompts. All prompts differ.

    A slot's first request is shorter, each slot's by another amount, so that their ends do not fall together.
    """
    plans: list[RequestPlan] = []

    def add(kind: str, at_s: float, num_prompt: int, max_tokens: int, session: str = "") -> None:
        prompt = random_tokens(num_prompt, test.vocab, (test.seed, 7, len(plans)))
        plans.append(RequestPlan(len(plans), kind, at_s, prompt, max_tokens, session))

    per_slot = 2 + math.ceil(test.end_s / (FASTEST_TOKEN_S * test.victim_tokens))
    for slot in range(test.slots):
        for number in range(per_slot):
            share = (slot + 1) / test.slots if number == 0 else 1.0
            add(VICTIM, 0.0, test.victim_prompt_tokens, max(2, round(share * test.victim_tokens)), f"slot-{slot}")
    for number in range(test.count):
        add(LONG, test.lead_s + number * test.interval_s, test.long_tokens, test.long_output_tokens)
    return plans


def by_slot(plans: Iterable[RequestPlan]) -> list[list[RequestPlan]]:
    """The victims' plans, slot by slot."""
    slots: dict[str, list[RequestPlan]] = {}
    for plan in plans:
        if plan.kind == VICTIM:
            slots.setdefault(plan.session, []).append(plan)
    return list(slots.values())


def gaps_within(record: RequestRecord, window: Window) -> list[tuple[float, float]]:
    """(when it ended, length) of each gap between two tokens of a request that both came inside the window; seconds."""
    moments = [moment for moment in record.token_s if window.holds(moment)]
    return [(after, after - before) for before, after in itertools.pairwise(moments)]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of the test on one arm: its records, and which part of it counts."""

    records: tuple[RequestRecord, ...]
    window: Window

    def of_kind(self, kind: str) -> list[RequestRecord]:
        return [record for record in self.records if record.kind == kind]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Of all victims, as in gaps_within."""
        return [gap for record in self.of_kind(VICTIM) for gap in gaps_within(record, self.window)]

    @property
    def num_tokens(self) -> int:
        """Of victims, inside the window."""
        return sum(self.window.holds(moment) for record in self.of_kind(VICTIM) for moment in record.token_s)


def pooled(rounds: Sequence[Round]) -> dict[str, float]:
    """Figures of one arm over its rounds. Victims: gaps and tokens inside the windows, TTFT of those sent there; long prompts: all."""
    victims = [record for one in rounds for record in one.of_kind(VICTIM) if record.ok and one.window.holds(record.sent_s)]
    longs = [record for one in rounds for record in one.of_kind(LONG)]
    failed = sum(not record.ok for one in rounds for record in one.records)
    seconds = sum(one.window.seconds for one in rounds)
    num_tokens = sum(one.num_tokens for one in rounds)
    figures = {"victim_tokens_per_s": num_tokens / seconds if seconds else 0.0, "failed": float(failed)}
    figures |= summarize(length for one in rounds for _, length in one.gaps).figures("itl_s")
    figures |= summarize(ttft(victims)).figures("victim_ttft_s")
    figures |= summarize(ttft(longs)).figures("long_ttft_s")
    figures |= summarize(gap for record in longs if record.ok for gap in gaps(record)).figures("long_itl_s")
    figures |= summarize(max(0.0, record.sent_s - record.planned_s) for record in longs).figures("long_late_s")
    return figures


def offered_tokens_per_s(test: VictimsTest) -> float:
    """Prompt tokens of long prompts by the second."""
    return test.long_tokens / test.interval_s


def beside_baseline(figures: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    """An arm's figures with injection, its baseline's as `baseline_...`, and the ratios of the two as `..._ratio`."""
    told = {**figures, **{f"baseline_{name}": value for name, value in baseline.items()}}
    names = (*(f"itl_s.{statistic}" for statistic in _STATISTICS), "victim_ttft_s.p50", "victim_ttft_s.max", "victim_tokens_per_s")
    return told | ratios(told, names)


def ratios(figures: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """With injection by without, of those names that have both: `itl_s.max` becomes `itl_ratio.max`."""
    found: dict[str, float] = {}
    for name in names:
        if name in figures and figures.get(f"baseline_{name}"):
            base, dot, statistic = name.partition(".")
            ratio = f"{base.removesuffix('_per_s').removesuffix('_s')}_ratio{dot}{statistic}"
            found[ratio] = figures[name] / figures[f"baseline_{name}"]
    return found


def best_budget(sweep: Mapping[int, Mapping[str, float]]) -> int:
    """The chunk budget at which a colocated worker does best: of those that keep up, the one with the shortest worst gap (p99.9, which one
    stroke of bad luck does not decide as it decides the maximum). To keep up: long TTFT p50 at most 1.5 times the shortest of the sweep,
    victims' tokens/s at least 0.9 of the highest. Precondition: at least one budget.
    """
    least_ttft = min(figures["long_ttft_s.p50"] for figures in sweep.values())
    most_tokens = max(figures["victim_tokens_per_s"] for figures in sweep.values())
    able = {
        budget: figures
        for budget, figures in sweep.items()
        if figures["long_ttft_s.p50"] <= 1.5 * least_ttft and figures["victim_tokens_per_s"] >= 0.9 * most_tokens
    }
    return min(able or sweep, key=lambda budget: (sweep[budget]["itl_s.p999"], budget))
