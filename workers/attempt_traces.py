"""When each attempt passed through this worker, from its frame to its first token: for GET /control/traces. Used by the control loop only.

    decode    Open -> Reserved -> record accepted -> first step
    prefill   Prefill -> first step -> the step that ends the prompt (what was pushed meanwhile: prefill/transfers.py)

Costs a look at each event while no attempt is on its way to its first token, which is what most events find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from pd_serve.ids import AttemptId
from pd_serve.protocol.link import Closed, Failed, Open, Prefill, Refused, Reserved
from pd_serve.protocol.notify import Completed
from pd_serve.protocol.traces import AttemptTrace
from workers.events import Action, Event, FrameReceived, NoticeArrived, RunBatch, SendFrame, StepDone

_MAX_UNDER_WAY = 4096
"""Of what never gets to a token (it ended with its link) the oldest is forgotten."""


class AttemptTraces:
    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: deque[AttemptTrace] = deque(maxlen=num_kept)
        self._under_way: dict[AttemptId, AttemptTrace] = {}
        self._in_step: tuple[AttemptId, ...] = ()

    def recent(self, limit: int) -> tuple[AttemptTrace, ...]:
        """The latest that have their first token, oldest first."""
        return tuple(self._kept)[-limit:] if limit > 0 else ()

    def observe(self, event: Event, actions: Iterable[Action], now: float) -> None:
        """`actions`: what the machine answered to the event; `now`: monotonic seconds."""
        if isinstance(event, FrameReceived) and isinstance(event.frame, Open | Prefill):
            self._begin(event.frame, now)
        if not self._under_way:
            return
        if isinstance(event, StepDone):
            self._step_done(event)
        elif isinstance(event, NoticeArrived) and isinstance(event.notice, Completed):
            self._change(event.notice.attempt_id, record_s=now)
        for action in actions:
            if isinstance(action, RunBatch):
                entries = action.batch.entries
                self._in_step = tuple(entry.attempt_id for entry in entries if entry.attempt_id in self._under_way)
            elif isinstance(action, SendFrame):
                frame = action.frame
                if isinstance(frame, Reserved):
                    self._change(frame.attempt_id, reserved_s=now)
                elif isinstance(frame, Refused | Failed | Closed):
                    self._under_way.pop(frame.attempt_id, None)

    def _begin(self, frame: Open | Prefill, now: float) -> None:
        if self._num_kept == 0:
            return
        if len(self._under_way) >= _MAX_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[frame.attempt_id] = AttemptTrace(frame.attempt_id, isinstance(frame, Prefill), now)

    def _step_done(self, event: StepDone) -> None:
        result = event.result
        sampled = {token.attempt_id for token in result.sampled}
        for attempt_id in self._in_step:
            trace = self._under_way.get(attempt_id)
            if trace is None:
                continue
            if trace.step_started_s is None:
                trace = self._change(attempt_id, step_started_s=result.started_at)
            if trace is not None and attempt_id in sampled:
                del self._under_way[attempt_id]
                self._kept.append(msgspec.structs.replace(trace, step_ended_s=result.ended_at))
        self._in_step = ()

    def _change(self, attempt_id: AttemptId, **moments: float) -> AttemptTrace | None:
        trace = self._under_way.get(attempt_id)
        if trace is not None:
            trace = self._under_way[attempt_id] = msgspec.structs.replace(trace, **moments)
        return trace
