"""What many events of one turn of the event loop ask for, done once: a thousand workers report some ten times a second each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class OnceATurn:
    """Called any number of times, it calls `what` in the loop's next turn."""

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what
        self._is_due = False

    def __call__(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._call)

    def _call(self) -> None:
        self._is_due = False
        self._what()
