"""What the processes of a cluster take of the cores, and wait for them; and where those that compute nothing may run.

Source: proc(5); /proc/PID/task/TID/schedstat: nanoseconds on a core, nanoseconds runnable but waiting for one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from pd_serve.bench.cluster import LocalCluster

ROUTER = "router"
_STEPS = re.compile(r"^pd_serve_step_seconds_count (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds since the start of a process, its threads together."""

    running_s: float
    waiting_s: float
    """In the run queue of a core that was given to something else."""
    num_steps: int = 0
    """Of the engine, where it is a worker's ranks."""

    def since(self, before: Use) -> Use:
        return Use(self.running_s - before.running_s, self.waiting_s - before.waiting_s, self.num_steps - before.num_steps)


def use_of(cluster: LocalCluster | None) -> dict[str, Use]:
    """By process, a worker's ranks (`NAME/rank`) apart from its front; empty for an endpoint that was there already."""
    found: dict[str, Use] = {}
    for process in cluster.processes if cluster is not None else ():
        found[process.name] = _use((process.pid,))
        if process.role != ROUTER and (ranks := _children(process.pid)):
            found[f"{process.name}/rank"] = replace(_use(ranks), num_steps=_num_steps(process.address))
    return found


def place_fronts(cluster: LocalCluster, cores: Iterable[int]) -> None:
    """Move router and fronts, not the ranks, to the given cores."""
    for process in cluster.processes:
        _place(process.pid, cores)


@contextlib.contextmanager
def placed_client(cores: Iterable[int]) -> Iterator[None]:
    """This process on the given cores for the length of a block; where there are none it stays where it is."""
    wanted, before = set(cores), os.sched_getaffinity(0)
    if wanted:
        _place(os.getpid(), wanted)
    try:
        yield
    finally:
        _place(os.getpid(), before)


def _place(pid: int, cores: Iterable[int]) -> None:
    """All threads: the setting is of each."""
    cores = set(cores)
    for task in _tasks(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def _use(pids: Iterable[int]) -> Use:
    running_ns = waiting_ns = 0
    for pid in pids:
        for task in _tasks(pid):
            with contextlib.suppress(OSError):
                running, waiting, _ = (task / "schedstat").read_text().split()
                running_ns += int(running)
                waiting_ns += int(waiting)
    return Use(running_ns / 1e9, waiting_ns / 1e9)


def _num_steps(address: str) -> int:
    """As last reported: exact once the rank is idle. 0 where it cannot be asked."""
    try:
        match = _STEPS.search(httpx.get(f"{address}/metrics", timeout=5, trust_env=False).text)
    except httpx.HTTPError:
        return 0
    return int(float(match[1])) if match is not None else 0


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
