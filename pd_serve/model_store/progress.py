"""How a slow preparation step tells its caller how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all); 0 in all where the total is unknown. Called on the caller's thread."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """For callers that show nothing."""
