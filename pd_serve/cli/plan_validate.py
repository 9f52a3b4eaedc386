"""`pd-serve plan validate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_serve.cli.options import JsonOption
from pd_serve.errors import ConfigError

if TYPE_CHECKING:
    from pd_serve.plan.validation import Predicted

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench fit --arm ours=1p1d --out fit.json\n\n"
    "  pd-serve bench load --arm ours=1p1d --rate 2 --duration 60 --input 64-1024 --save-plans plans.jsonl --out load.json\n\n"
    "  pd-serve plan validate load.json --fit fit.json --plans plans.jsonl"
)


def validate(
    results: Annotated[list[Path], typer.Argument(help="Results of bench load or bench trace, their records beside them")],
    fit: Annotated[Path, typer.Option("--fit", help="Result of bench fit on the same machine, its worker models beside it")],
    plans: Annotated[
        list[Path] | None,
        typer.Option("--plans", help="What was sent, by --save-plans, for each result in turn: prompts that share prefixes need it"),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Simulations of each, with noise of their own")] = 9,
    json: JsonOption = False,
) -> int:
    """How far a plan may be trusted here: what was measured, and what the simulator says of the very same requests."""
    from pd_serve.bench.progress import Bars
    from pd_serve.bench.workload import read_plans
    from pd_serve.plan.validation import read_fitted, read_measured
    from pd_serve.plan.validation import validate as validated

    if plans and len(plans) != len(results):
        raise ConfigError(f"{len(results)} results and {len(plans)} plans: name one for each, in the same order")
    fitted = read_fitted(fit)
    found: list[Predicted] = []
    with Bars(json) as bars:
        bar = bars.add("simulations", seeds * len(results))
        for index, path in enumerate(results):
            sent = read_plans(plans[index]) if plans else []
            for measured in read_measured(path):
                found += validated(measured, fitted, sent, seeds, bar.advance)
    _show(found, as_json=json)
    return 0


def _show(found: list[Predicted], as_json: bool) -> None:
    import msgspec

    from pd_serve.bench.figures import shown
    from pd_serve.cli.plan_show import plan_console, table
    from pd_serve.plan.validation import TARGET

    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    rows = [
        (
            each.load,
            each.figure,
            shown(each.figure, each.measured),
            shown(each.figure, each.predicted),
            f"{shown(each.figure, each.low)} - {shown(each.figure, each.high)}",
            f"{100 * each.error:+.0f} %",
            "" if each.is_within else "missed",
        )
        for each in found
    ]
    console = plan_console()
    console.print(table(("load", "figure", "measured", "predicted", "over seeds", "error", ""), rows))
    console.print(f"{sum(each.is_within for each in found)} of {len(found)} within {100 * TARGET:.0f} %")
