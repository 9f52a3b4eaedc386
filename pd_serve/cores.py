"""How many CPU cores there are to compute on, and which ones a setting names. Used by the launcher, the fronts and doctor."""

from __future__ import annotations

import math
import os
from pathlib import Path

from pd_serve.errors import ConfigError


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and the CPU quota of its container where that is less."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores()))


def parse_cores(text: str) -> frozenset[int]:
    """`0`, `2-5` or `0,2-3`. Empty text: the empty set. Raises ConfigError."""
    cores: set[int] = set()
    try:
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            first, dash, last = part.partition("-")
            cores.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise ConfigError(f"engine.cpu_affinity = {text!r}: expected cores such as 0 or 2-5") from None
    missing = cores - set(range(os.cpu_count() or 1))
    if missing:
        raise ConfigError(f"engine.cpu_affinity = {text!r}: this machine has no core {min(missing)}")
    return frozenset(cores)


def divide_cores(num_cores: int, num_workers: int) -> tuple[int, ...]:
    """Threads of each worker: equal shares, the first ones one more where it does not come out even, never less than one."""
    share, left = divmod(num_cores, num_workers)
    return tuple(max(1, share + (1 if index < left else 0)) for index in range(num_workers))


def thread_env(num_threads: int) -> dict[str, str]:
    """For a process that computes. Passive waiting: threads that spin at a barrier take the core from whoever would reach it. Large pages,
    where the system gives them to who asks: weights are read an eighth faster from them (measured, a virtual machine)."""
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


def _quota_cores() -> int:
    """Cores of the cgroup's quota, rounded up; unlimited where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return 1 << 16
