"""How every command of `pd-serve bench` ends: a table of figures by arm, or the result as one line of JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pd_serve.bench.figures import shown
from pd_serve.bench.results import Result

_FILE_WIDTH = 140
BUSY_CORES = 0.25
"""Load by others above which a run is told to be of little worth."""


def show(result: Result, path: Path, as_json: bool) -> None:
    """`path`: where the result lies."""
    if as_json:
        print(msgspec.json.encode(result).decode())
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    names = list(dict.fromkeys(name for arm in result.arms.values() for name in arm.figures))
    cells = {
        (name, arm): "" if (value := figures.figures.get(name)) is None else shown(name, value)
        for name in names
        for arm, figures in result.arms.items()
    }
    is_wide = len(result.arms) > len(names)
    rows, columns = (list(result.arms), names) if is_wide else (names, list(result.arms))
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        table.add_row(row, *(cells[(column, row) if is_wide else (row, column)] for column in columns))
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    load = result.load
    style = "yellow" if load.others_cores + load.steal_cores > BUSY_CORES else "dim"
    console.print(
        f"load by others {load.others_cores:.2f} of {load.cores} cores (most in a second {load.others_cores_max:.2f}), "
        f"stolen {load.steal_cores:.2f}",
        style=style,
        soft_wrap=True,
    )
    console.print(f"{path}    page: pd-serve bench report {path}", style="dim", soft_wrap=True, markup=False)
