"""Ties a child process to its parent through the kernel, for parents that must not leave anything behind however they end."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Run in the child between fork and exec (preexec_fn): when the parent's starting thread ends, the kernel sends `signum`.

    Linux only (prctl(2), PR_SET_PDEATHSIG); elsewhere it does nothing. The check closes the gap in which the parent died before the call.
    """
    prctl = getattr(_LIBC, "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)
