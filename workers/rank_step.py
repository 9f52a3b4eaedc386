"""One step at a time on a rank's threads: what of it is pushed to the transport thread, the batch to the engine thread. Used by the rank's
main thread, whether the rank leads (control_loop.py) or follows (rank_follower.py)."""

from __future__ import annotations

from pd_serve.engine.batch import Batch
from workers.engine_thread import EngineThread
from workers.events import FlushThenNotify, PushPlan
from workers.prefill.grouping import push_points
from workers.transport_commands import BeginStep, StepEnded
from workers.transport_thread import TransportThread


class StepThreads:
    """begin -> the engine thread's StepDone or StepFailed -> end. The transport thread hears only of steps that push something, and is not
    woken for their begin and end: the layers in between do that."""

    def __init__(self, engine: EngineThread, transport: TransportThread, push_nbytes: int) -> None:
        """`push_nbytes`: least bytes of one push, as in transport.push_bytes."""
        self._engine = engine
        self._transport = transport
        self._push_nbytes = push_nbytes
        self._is_told = False
        """The transport thread has something to do with the running step."""

    def begin(self, batch: Batch, pushes: tuple[PushPlan, ...], completions: tuple[FlushThenNotify, ...] = ()) -> None:
        """`pushes`, `completions`: this rank's."""
        self._is_told = bool(pushes or completions)
        if self._is_told:
            self._transport.submit(BeginStep(batch.step_id, pushes, completions), is_urgent=False)
        self._engine.run(batch, push_points(pushes, self._push_nbytes), bool(completions))

    def end(self, step_id: int) -> None:
        """Call before anything that follows from the step."""
        if self._is_told:
            self._transport.submit(StepEnded(step_id), is_urgent=False)
            self._is_told = False
