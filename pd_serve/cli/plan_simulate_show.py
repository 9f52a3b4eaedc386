"""What `pd-serve plan simulate` shows: one column a fleet, the verdict, and the files that were written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from pd_serve.bench.figures import shown
from pd_serve.cli.plan_show import plan_console, table
from pd_serve.cli.plan_simulate_inputs import settings_of
from pd_serve.plan.candidates import best_supply
from pd_serve.plan.outcome import ATTAINMENTS
from pd_serve.plan.ratio import Demand, best_split, ratio
from pd_serve.plan.scenario import Scenario
from pd_serve.plan.study import Arm, Question, Study

_FIGURES = (
    *(f"{name}.{share}" for name in ("ttft_s", "itl_s") for share in ("p50", "p90", "p99", "max")),
    "tpot_s.mean",
    "output_tokens_per_s",
    "prefix_hit_rate",
    "rejected_share",
)
_USE = "utilization_share."
_MOST_PASSED = 4


def show(found: Study, scenario: Scenario, question: Question, written: Sequence[Path], as_json: bool) -> None:
    if as_json:
        told = {"scenario": settings_of(scenario), "study": found, "files": [str(path) for path in written]}
        print(msgspec.json.encode(told).decode())
        return
    console = plan_console()
    slo, shape = scenario.slo, question.shape
    limits = [f"TTFT {1e3 * slo.ttft_s:g} ms"] * bool(slo.ttft_s) + [f"99 % of a request's gaps {1e3 * slo.itl_s:g} ms"] * bool(slo.itl_s)
    load = f"{scenario.load.words()}: {shape.num_prompt:,.0f} in ({shape.num_uncached:,.0f} of them new), {shape.num_output:,.0f} out"
    console.print(f"[bold]{load}[/bold]; limits {' and '.join(limits)}", soft_wrap=True)
    for name in dict.fromkeys(pool.model.name for arm in found.arms for pool in arm.fleet.pools):
        console.print(f"workers: {name}", markup=False, soft_wrap=True)
    if question.num_gpus:
        console.print(_formula(question), soft_wrap=True)
    console.print(table(["", *(arm.fleet.name for arm in found.arms)], _rows(found.arms), f"At {found.rate:.4g} requests/s"))
    if found.scaled:
        columns = ["", *(arm.fleet.name for arm in found.scaled)]
        title = f"At {found.scaled[0].at_load.rate:.4g} requests/s, {question.scale:g} times as fast"
        console.print(table(columns, _rows(found.scaled), title))
    if len(found.curves) > len(found.arms):
        console.print(table(["tried", *(f"goodput {share:.0%}" for share in ATTAINMENTS), "per GPU at 90%", "runs"], _tried(found)))
    for passed in found.passed[:_MOST_PASSED]:
        console.print(f"not tried: {passed.candidate.name}, which {passed.why}", style="dim", markup=False, soft_wrap=True)
    if len(found.passed) > _MOST_PASSED:
        console.print(f"not tried: {len(found.passed) - _MOST_PASSED} more, for such reasons", style="dim")
    for number, line in enumerate(found.verdict):
        console.print(f"{'Verdict: ' if not number else '  '}{line}", style="bold" if not number else None, markup=False, soft_wrap=True)
    for path in written:
        console.print(str(path), style="dim", markup=False, soft_wrap=True)


def _rows(arms: Sequence[Arm]) -> Iterator[list[str]]:
    yield ["GPUs", *(str(arm.fleet.num_gpus) for arm in arms)]
    if any(arm.goodput for arm in arms):
        for share in ATTAINMENTS:
            yield [f"goodput at {share:.0%}, requests/s", *(f"{arm.goodput[str(share)]:.3g}" if arm.goodput else "" for arm in arms)]
            yield ["  per GPU", *(f"{arm.per_gpu(share):.3g}" if arm.goodput else "" for arm in arms)]
    yield ["requests within the limits", *(f"{arm.at_load.attainment:.1%}" for arm in arms)]
    for name in (*_FIGURES, *_uses(arms)):
        cells = [shown(name, arm.at_load.figures[name]) if name in arm.at_load.figures else "" for arm in arms]
        if any(cells):
            yield [_words(name), *cells]
    for reason in sorted({reason for arm in arms for reason in arm.at_load.rejected}):
        shares = [arm.at_load.rejected.get(reason, 0) / max(1, arm.at_load.num_requests) for arm in arms]
        yield [f"  rejected: {reason}", *(f"{share:.1%}" for share in shares)]


def _formula(question: Question) -> str:
    """What arithmetic alone says, of the first models."""
    prefill, decode = question.models.prefill[0], question.models.decode[0]
    supply = best_supply(prefill, decode, question.shape, question.itl_s)
    demand = Demand(question.shape.num_uncached, question.shape.num_output)
    split = best_split(question.num_gpus, demand, supply)
    return (
        f"ratio formula, workers always full: T_P {supply.prefill_tokens_per_s:,.0f} and T_D {supply.decode_tokens_per_s:,.0f} tokens/s, "
        f"R = {ratio(demand, supply):.2f}, so {split.num_prefill}P{split.num_decode}D, at most {split.sustained_requests_per_s:.3g} req/s"
    )


def _tried(found: Study) -> Iterator[list[str]]:
    for curve in found.curves:
        goodputs = [f"{curve.goodput(share):.3g} /s" for share in ATTAINMENTS]
        yield [curve.candidate.name, *goodputs, f"{curve.per_gpu(ATTAINMENTS[0]):.3g} /s", str(len(curve.trials))]


def _uses(arms: Sequence[Arm]) -> list[str]:
    return sorted({name for arm in arms for name in arm.at_load.figures if name.startswith(_USE)})


def _words(name: str) -> str:
    base, _, part = name.partition(".")
    words = {
        "ttft_s": "TTFT",
        "itl_s": "ITL",
        "tpot_s": "TPOT",
        "output_tokens_per_s": "output tokens",
        "prefix_hit_rate": "prompt tokens from caches",
        "rejected_share": "requests turned away",
        "utilization_share": "in steps,",
    }
    return f"{words[base]} {part}".rstrip()
