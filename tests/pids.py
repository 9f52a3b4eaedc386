"""Other processes, which may end at any moment: between two calls as well."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

import psutil


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    """To those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
