"""The group `pd-serve bench`: one line per command, each in a file of its own (bench_<name>.py) that imports what it runs when it runs."""

from __future__ import annotations

import typer

from pd_serve.cli.bench_load import EPILOG as LOAD_EPILOG
from pd_serve.cli.bench_load import load

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Measure endpoints, ours or others', as their users would: results as JSON, with a page and pictures (pd-serve bench report).",
    epilog="Start here: [bold]pd-serve bench load --arm ours=1p1d[/bold]. What each figure means: docs/benchmarks.md.",
)
bench.command(epilog=LOAD_EPILOG)(load)
