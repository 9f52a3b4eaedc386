"""Virtual time, simulated processes, ordered channels and the log of one run. Everything random is drawn from the run's one seed."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from random import Random


class ViolationError(AssertionError):
    """An invariant does not hold: the machines, or a planted bug, are wrong."""


class Loop:
    """A heap of callbacks in virtual time. Callbacks of the same instant run in the order in which they were scheduled."""

    def __init__(self, seed: int, is_verbose: bool = False) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.is_verbose = is_verbose
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.at(self.now + delay_s, callback)

    def run_until(self, time: float) -> None:
        while self._heap and self._heap[0][0] <= time:
            self.now, _, callback = heapq.heappop(self._heap)
            self.num_events += 1
            callback()
        self.now = time

    def log(self, who: object, *words: object) -> None:
        """Formats only when somebody reads it."""
        if self.is_verbose:
            print(f"{self.now * 1000:10.3f} ms  {who!s:<10} {' '.join(map(str, words))}")


class Process:
    """An operating-system process: may be stopped and continued (SIGSTOP), or die. Its memory outlives a stop."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.is_dead = False
        self.is_stopped = False
        self.clock_offset = loop.rng.uniform(0, 1e5)
        """Processes do not agree on the time."""
        self._backlog: deque[Callable[[], None]] = deque()

    @property
    def clock(self) -> float:
        return self.loop.now + self.clock_offset

    def call(self, callback: Callable[[], None]) -> None:
        """Run in the process: now, once it continues, or never."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._backlog.append(callback)
        else:
            callback()

    def stop(self) -> None:
        self.is_stopped = True
        self.loop.log(self.name, "STOPPED")

    def resume(self) -> None:
        if not self.is_stopped or self.is_dead:
            return
        self.loop.log(self.name, "CONTINUED")
        self.is_stopped = False
        while self._backlog and not self.is_stopped and not self.is_dead:
            self._backlog.popleft()()

    def die(self) -> None:
        self.is_dead = True
        self._backlog.clear()
        self.loop.log(self.name, "DIED")


class Channel:
    """Carries callbacks to a process in the order sent, each after a random delay: a thread's queue, or a connection."""

    def __init__(self, target: Process, delay_s: tuple[float, float], spike: tuple[float, float] = (0.0, 0.0)) -> None:
        self._target = target
        self._delay_s = delay_s
        self._spike = spike
        """(probability, longest extra delay in seconds)"""
        self._last = 0.0

    def send(self, callback: Callable[[], None]) -> None:
        loop = self._target.loop
        delay = loop.rng.uniform(*self._delay_s)
        if self._spike[0] and loop.rng.random() < self._spike[0]:
            delay += loop.rng.uniform(0, self._spike[1])
        self._last = max(self._last, loop.now + delay)
        loop.at(self._last, lambda: self._target.call(callback))
