"""`pd-serve bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Example:\n\n  pd-serve bench report bench-results/*.json --out report.html"


def report(
    results: Annotated[list[Path], typer.Argument(help="Results, in the order to show them")],
    out: Annotated[Path | None, typer.Option("--out", help="The page; by default beside the first result, .html")] = None,
) -> int:
    """Make one HTML page of results, with pictures inside it and as PNG beside it."""
    from pd_serve.bench.report import write_report

    for path in write_report(results, out or results[0].with_suffix(".html")):
        print(path)
    return 0
