"""What else the machine did during a run: figures of two runs may be compared only when others took as much of it in both.

MachineWatch samples from a thread of its own, once a second; everything that it measured belongs to that thread until `load` is asked for
after the end. Source: proc(5), /proc/stat and the times of our own process tree.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

LIMIT_CORES = 0.10
"""Mean load by others, in cores, by which two runs may differ."""
WINDOW_S = 1.0
_SHORTEST_WINDOW_S = 0.25
"""The counters tick in hundredths of a second: what is shorter says nothing."""


class MachineLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU use in cores (1.0: one core all the time) from begin to end of a run."""

    cores: int
    duration_s: float
    own_cores: float
    """By this process and everything it started, mean."""
    others_cores: float
    """By every other process, mean; time the host took away is in `steal_cores`."""
    others_cores_max: float
    """Of any window of one second."""
    steal_cores: float
    frequency_mhz: float
    """As the kernel says at the end, mean of the cores; 0: it does not."""
    loadavg_1m: float
    """At the start."""


class MachineWatch:
    """`with MachineWatch() as watch: ...`, then `watch.load`. `pids`: further processes that are part of what is measured."""

    def __init__(self, pids: Sequence[int] = (), window_s: float | None = WINDOW_S) -> None:
        """`window_s` None: sampled at begin and end only, where a millisecond of this process every second would be seen in its figures."""
        self._window_s = window_s
        self._roots = (os.getpid(), *pids)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="machine-watch", daemon=True)
        self._windows: list[_Window] = []
        self._last: _Sample
        self._loadavg = 0.0

    def __enter__(self) -> MachineWatch:
        self._loadavg = os.getloadavg()[0]
        # Here, not in the thread: that may get its first turn when the block is half over.
        self._last = _sample(self._roots)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self._add_window()

    @property
    def load(self) -> MachineLoad:
        """Once the block has ended."""
        windows = self._windows
        seconds = sum(window.seconds for window in windows)
        whole = [window for window in windows if window.seconds >= _SHORTEST_WINDOW_S]

        def mean(cores: list[float]) -> float:
            return sum(value * window.seconds for value, window in zip(cores, windows, strict=True)) / seconds if seconds > 0 else 0.0

        return MachineLoad(
            cores=os.cpu_count() or 1,
            duration_s=seconds,
            own_cores=mean([window.own for window in windows]),
            others_cores=max(0.0, mean([window.others for window in windows])),
            others_cores_max=max((max(0.0, window.others) for window in whole), default=0.0),
            steal_cores=mean([window.steal for window in windows]),
            frequency_mhz=_frequency_mhz(),
            loadavg_1m=self._loadavg,
        )

    def _watch(self) -> None:
        while not self._end.wait(self._window_s):
            self._add_window()

    def _add_window(self) -> None:
        """By the thread, and at the end, when it is over, by the one that watches."""
        now = _sample(self._roots)
        self._windows.append(_window(self._last, now))
        self._last = now


def differs(a: MachineLoad, b: MachineLoad, limit_cores: float = LIMIT_CORES) -> str | None:
    """Why figures of the two runs must not be compared, in one line that names both loads; None: they may."""
    if a.cores != b.cores:
        return f"one ran on {a.cores} cores, the other on {b.cores}"
    if abs(a.others_cores + a.steal_cores - b.others_cores - b.steal_cores) > limit_cores:
        return f"the load by others differed by more than {limit_cores:g} cores: {_words(a)} in one, {_words(b)} in the other"
    return None


def _words(load: MachineLoad) -> str:
    stolen = f" and {load.steal_cores:.2f} stolen" if load.steal_cores >= 0.005 else ""
    return f"{load.others_cores:.2f} cores{stolen}"


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    busy_s: float
    steal_s: float
    own_s: dict[int, float]
    """By process, so that one that ended takes nothing away."""


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    own: float
    others: float
    steal: float


def _sample(roots: Sequence[int]) -> _Sample:
    busy_s, steal_s = _machine_seconds()
    return _Sample(time.monotonic(), busy_s, steal_s, _family_seconds(roots))


def _window(before: _Sample, after: _Sample) -> _Window:
    seconds = after.at - before.at
    if seconds <= 0:
        return _Window(0.0, 0.0, 0.0, 0.0)
    own_s = sum(value - before.own_s.get(pid, 0.0) for pid, value in after.own_s.items())
    busy_s, steal_s = after.busy_s - before.busy_s, after.steal_s - before.steal_s
    return _Window(seconds, own_s / seconds, (busy_s - own_s) / seconds, steal_s / seconds)


def _machine_seconds() -> tuple[float, float]:
    """Busy and stolen since boot, summed over the cores. Guests' time is in user's already."""
    times = psutil.cpu_times()
    busy = times.user + times.system + times.nice + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
    return busy, getattr(times, "steal", 0.0)


def _family_seconds(roots: Sequence[int]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        for member in family:
            try:
                times = member.cpu_times()
            except psutil.Error:
                continue
            seconds[member.pid] = times.user + times.system
    return seconds


def _frequency_mhz() -> float:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        values = [float(line.rpartition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return 0.0
    return sum(values) / len(values) if values else 0.0
