"""Progress bars of a measurement on stderr: nothing where stderr is no terminal, and nothing with --json."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """`with Bars(as_json) as bars: bar = bars.add("warming up", 10); bar.advance()`. What is redrawn, at most four times a second, costs
    the client's core a little less than a millisecond.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._progress: Progress | None = None
        self._quiet = quiet

    def __enter__(self) -> Bars:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if console.is_terminal and not self._quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, refresh_per_second=4)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def add(self, what: str, total: int) -> Bar:
        return Bar(self._progress, self._progress.add_task(what, total=total) if self._progress is not None else None)

    def note(self, text: str) -> None:
        """A line above the bars."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False)


class Bar:
    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, *_: object) -> None:
        """One more; also taken as a callback of the runner, which hands it a record."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
