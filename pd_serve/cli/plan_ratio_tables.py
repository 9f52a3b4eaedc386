"""What `pd-serve plan ratio` shows."""

from __future__ import annotations

import msgspec
from rich.console import Console

from pd_serve.cli.plan_show import plan_console, share, table
from pd_serve.plan.measured import Measured
from pd_serve.plan.ratio import Demand, Need, Split, Supply
from pd_serve.plan.trace_demand import TraceDemand

_LEAST_SPLIT_RATIO = 16


class RatioReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    demand: Demand
    supply: Supply
    ratio: float
    needs: tuple[Need, ...]
    split: Split | None
    """None: no number of GPUs was given."""
    trace: TraceDemand | None
    measured: Measured | None


def show(report: RatioReport, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    console = plan_console()
    if report.trace is not None:
        _trace(console, report.trace)
    if report.measured is not None:
        _measured(console, report.measured)
    demand, supply = report.demand, report.supply
    cached = f", {share(demand.hit_rate)} of them cached" if demand.hit_rate else ""
    console.print(
        f"S_in {demand.prompt_tokens:,.0f} tokens{cached}, S_out {demand.output_tokens:,.0f}; "
        f"T_P {supply.prefill_tokens_per_s:,.0f} tokens/s, T_D {supply.decode_tokens_per_s:,.0f} tokens/s an instance",
        soft_wrap=True,
    )
    console.print(
        f"[bold]R = (S_in / S_out) x (T_D / T_P) = {report.ratio:.4g}[/bold]{_fraction(report.ratio)} prefill instances for one of decode",
        soft_wrap=True,
    )
    if report.measured is not None and not report.measured.is_capacity:
        console.print("R and what follows from it stand on figures that are no capacities: see above", style="yellow", soft_wrap=True)
    if report.needs:
        console.print(table(("requests/s", "", "busy at most", "N_P", "N_D", "instances", "GPUs", "sustains"), map(_row, report.needs)))
    else:
        console.print("with --rate, how many of each; with --total-gpus, how to share them out", style="dim")
    if report.split is not None:
        split = report.split
        console.print(
            f"{split.num_gpus} GPUs as {split.num_prefill}P{split.num_decode}D sustain {split.sustained_requests_per_s:.4g} requests/s, "
            f"prefill busy {share(split.busy_prefill)}, decode {share(split.busy_decode)} of the time",
            soft_wrap=True,
        )


def _row(need: Need) -> tuple[str, ...]:
    return (
        f"{need.requests_per_s:.4g}",
        need.name,
        share(need.utilisation),
        f"{need.exact_prefill:.2f}",
        f"{need.exact_decode:.2f}",
        f"{need.num_prefill}P{need.num_decode}D",
        f"{need.num_gpus}",
        f"{need.sustained_requests_per_s:.4g}",
    )


def _fraction(ratio: float) -> str:
    """Of lopsided ones, as 1/64."""
    return f" (1/{1 / ratio:.3g})" if ratio <= 1 / _LEAST_SPLIT_RATIO else ""


def _trace(console: Console, trace: TraceDemand) -> None:
    hits = (
        f"; a cache that forgets nothing would have {share(trace.ideal_hit_rate)} of the prompt tokens (--hit-rate)"
        if trace.ideal_hit_rate
        else ""
    )
    console.print(
        f"trace: {trace.num_requests:,} requests in {trace.seconds / 60:.1f} min, {trace.requests_per_s:.3g} a second, "
        f"{trace.peak_requests_per_s:.3g} in its busiest minute{hits}",
        soft_wrap=True,
    )


def _measured(console: Console, found: Measured) -> None:
    for name, phase in (("T_P", found.prefill), ("T_D", found.decode)):
        if phase is None:
            console.print(f"{name} was not measured", style="yellow", soft_wrap=True)
            continue
        many = f", mean of {phase.num_workers} instances" if phase.num_workers > 1 else ""
        style = "" if phase.is_capacity else "yellow"
        console.print(f"{name} {phase.tokens_per_s:,.0f} tokens/s{many}: {phase.words}", style=style, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
