"""The command line. `main` is the console script `pd-serve`; nothing heavy is imported until a command needs it."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    from pd_serve.cli.app import run

    raise SystemExit(run(arguments))
