"""How commands of `pd-serve plan` print: tables as everywhere, and quantities in the unit in which they can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 160


def plan_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """The first column to the left, numbers to the right."""
    made = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def seconds(value: float) -> str:
    if value >= 10:
        return f"{value:.1f} s"
    return f"{1e3 * value:,.0f} ms" if value >= 0.01 else f"{1e3 * value:.2f} ms"


def nbytes(value: float) -> str:
    """GB is 1e9 bytes."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"
