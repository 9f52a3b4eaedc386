"""Virtual time: the events of one simulation in their order, and as much of an asyncio event loop as the router's code asks of one.

The router's dispatcher, its timers and its role loop run on it as they are. Events of one moment happen in the order in which they were
made, so that a run is the same every time. Used by one thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast


class VirtualLoop:
    """at(), soon() -> run(). As a Clock: now()."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._ready: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._num_made = 0
        self.error: BaseException | None = None
        """Of a task that failed: raised by run()."""

    # ---- the simulation's

    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def at(self, when: float, what: Callable[..., object], *args: object) -> None:
        """A moment that is past counts as now."""
        self._num_made += 1
        heapq.heappush(self._events, (when, self._num_made, what, args))

    def soon(self, what: Callable[..., object], *args: object) -> None:
        """Now, when what happens now is over."""
        self._ready.append((what, args))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until nothing is left to happen, or `is_over`, which is asked after every event. Raises what an event raises."""
        with self.running():
            self._run(is_over)

    @contextmanager
    def running(self) -> Iterator[None]:
        """It is the loop that asyncio.get_running_loop() finds."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self))
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def _run(self, is_over: Callable[[], bool]) -> None:
        events, ready, pop = self._events, self._ready, heapq.heappop
        while True:
            while ready:
                what, args = ready.popleft()
                what(*args)
            if self.error is not None:
                raise self.error
            if not events or is_over():
                return
            when, _, what, args = pop(events)
            if when > self._now:
                self._now = when
            what(*args)

    # ---- asyncio's

    time = now

    def call_soon(self, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None) -> None:
        self._ready.append((callback, args))

    def call_later(self, delay: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None) -> Timer:
        return self.call_at(self._now + delay, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None) -> Timer:
        timer = Timer(callback, args)
        self.at(when, timer.run)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def create_task(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        return asyncio.Task(coroutine, loop=cast(asyncio.AbstractEventLoop, self))

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.error = context.get("exception") or RuntimeError(str(context.get("message")))


class Timer:
    """Of call_later()."""

    __slots__ = ("_args", "_callback")

    def __init__(self, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args

    def cancel(self) -> None:
        """Idempotent."""
        self._callback, self._args = None, ()

    def run(self) -> None:
        if self._callback is not None:
            self._callback(*self._args)
