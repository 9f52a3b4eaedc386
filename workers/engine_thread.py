"""The thread that owns every torch object: loads the model, then computes one step at a time. Knows nothing of requests or transfers.

    start() -> call(build something)* -> serve(runner) -> run(batch, ...)*  -> stop()

Results go out through `post`, called on this thread: StepDone, or StepFailed where the runner raised (that step's attempts fail, the worker
goes on), or EngineFailed where it keeps raising, and the worker must end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from pd_serve.clock import Clock
from pd_serve.engine.batch import Batch, StepResult
from pd_serve.grammar.base import Grammar
from workers.events import StepDone, StepFailed
from workers.transport_commands import LayerReady, StepSampled

_log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that may fail before the engine is given up."""

T = TypeVar("T")


class Runner(Protocol):
    """What the thread drives: pd_serve.engine's ModelRunner, or a fake."""

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine cannot go on; the worker must end."""

    detail: str


@dataclass(frozen=True, slots=True)
class LayerHook:
    """What happens when the KV of a layer after which there is a push has been written."""

    submit: Callable[[LayerReady | StepSampled], None]
    """To the transport thread."""
    wait: Callable[[int], None] | None = None
    """Blocks until the device has written a layer (LayerEvents.wait); called on the transport thread. None where the layer is written when
    the hook fires (CPU)."""


@dataclass(frozen=True, slots=True)
class _Step:
    batch: Batch
    push_after: frozenset[int]
    has_completions: bool


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Serve:
    runner: Runner
    hook: LayerHook


class EngineThread:
    """Its methods are called by the control thread."""

    def __init__(self, post: Callable[[StepDone | StepFailed | EngineFailed], None], clock: Clock) -> None:
        self._post = post
        self._clock = clock
        self._queue: SimpleQueue[_Step | _Call | _Serve | None] = SimpleQueue()
        self._prepare: Callable[[Grammar], None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine thread; its result or its exception."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)

        self._queue.put(_Call(run))
        return future

    def serve(self, runner: Runner, hook: LayerHook, prepare: Callable[[Grammar], None] | None = None) -> None:
        """From now on `run` computes with this runner. `prepare`: what `expect` calls."""
        self._prepare = prepare
        self._queue.put(_Serve(runner, hook))

    def expect(self, grammar: Grammar) -> None:
        """An attempt that must keep to it has come: it may be made ready before its first step. On the caller's thread; takes no time."""
        if self._prepare is not None:
            self._prepare(grammar)

    def run(self, batch: Batch, push_after: frozenset[int] = frozenset(), has_completions: bool = False) -> None:
        """Compute a step; after each of those layers a LayerReady is submitted, of it and of those since the one before, all of them before
        the step's end is posted. `has_completions`: a StepSampled is submitted at its end, unless it fails."""
        self._queue.put(_Step(batch, push_after, has_completions))

    def stop(self, timeout_s: float) -> bool:
        """Let the running step end, then the thread. False if it still runs after `timeout_s`."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - thread root: reported, then the worker ends
            _log.exception("engine thread failed")
            self._post(EngineFailed(f"{type(error).__name__}: {error}"))

    def _loop(self) -> None:
        serving: _Serve | None = None
        num_failed = 0
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Call):
                item.run()
            elif isinstance(item, _Serve):
                serving = item
            else:
                assert serving is not None, "a step before serve()"
                num_failed = 0 if self._step(item, serving) else num_failed + 1
                if num_failed >= MAX_FAILED_STEPS:
                    self._post(EngineFailed(f"{num_failed} steps in a row have failed"))
                    return

    def _step(self, step: _Step, serving: _Serve) -> bool:
        on_layer = self._layer_callback(step, serving.hook) if step.push_after else None
        try:
            result = serving.runner.execute(step.batch, on_layer)
        except Exception as error:  # noqa: BLE001 - root of a step: its attempts fail, the worker goes on
            _log.exception("step %d failed", step.batch.step_id)
            self._post(StepFailed(step.batch.step_id, f"{type(error).__name__}: {error}"))
            return False
        if step.has_completions:
            # First: a decode worker waits for it.
            serving.hook.submit(StepSampled(result))
        self._post(StepDone(result))
        return True

    def _layer_callback(self, step: _Step, hook: LayerHook) -> Callable[[int], None]:
        submit, wait, now = hook.submit, hook.wait, self._clock.now
        step_id, push_after = step.batch.step_id, step.push_after
        held: list[float] = []

        def on_layer(layer: int) -> None:
            if layer not in push_after:
                held.append(now())
                return
            submit(LayerReady(step_id, layer, now(), None if wait is None else partial(wait, layer), tuple(held)))
            held.clear()

        return on_layer
