"""`pd-serve bench compare`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from pd_serve.cli.options import JsonOption

EPILOG = (
    "Examples:\n\n"
    "  pd-serve bench compare before.json after.json\n\n"
    "  pd-serve bench compare bench-results/load-20260101-120000.json       the arms of one run, the first against the others"
)


def compare(
    a: Annotated[Path, typer.Argument(help="A result; ratios are against it")],
    b: Annotated[Path | None, typer.Argument(help="Another result of the same command; none: the arms of the first")] = None,
    force: Annotated[bool, typer.Option("--force", help="Compare even if the machine's load by others differed")] = False,
    limit: Annotated[float, typer.Option("--limit", min=0.0, help="Cores by which the load by others may differ")] = 0.10,
    json: JsonOption = False,
) -> int:
    """Ratios of two results and what was set differently; refused when the load by others differed."""
    import msgspec
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pd_serve.bench.compare import compare_arms, compare_results
    from pd_serve.bench.figures import shown
    from pd_serve.bench.results import read_result

    first = read_result(a)
    comparison = compare_arms(first) if b is None else compare_results(first, read_result(b), limit, force)
    if json:
        rows = [{**msgspec.to_builtins(row), "ratio": row.ratio if row.ratio == row.ratio else None} for row in comparison.rows]
        print(json_module.dumps({"rows": rows, "differences": msgspec.to_builtins(comparison.differences)}))
        return 0
    console = Console(highlight=False)
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for header in ("arm", "figure", "A", "B", "B / A"):
        table.add_column(header, justify="left" if header in ("arm", "figure") else "right", overflow="fold")
    for row in comparison.rows:
        table.add_row(row.arm, row.figure, shown(row.figure, row.a), shown(row.figure, row.b), f"{row.ratio:.3f}")
    console.print(table)
    for one in comparison.differences:
        console.print(f"{one.process} {one.key}: {_word(one.a)} | {_word(one.b)}", markup=False, soft_wrap=True)
    if not comparison.differences:
        console.print("settings alike", style="dim")
    return 0


def _word(value: object) -> str:
    return "absent" if value is None else str(value) or "(empty)"
