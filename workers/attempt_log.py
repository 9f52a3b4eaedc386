"""Log lines of a worker about single attempts, each with its attempt id: what failed as a warning, every step at debug.

Used by the control loop. A router's log names the attempts of each request: together they tell its way through the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pd_serve.observe import about
from pd_serve.protocol.link import Cancel, Closed, Failed, Open, Prefill, PrefillDone, Refused, Reserved
from workers.events import Action, Event, FrameReceived, SendFrame

_log = logging.getLogger(__name__)

_IN = (Open, Prefill, Cancel)
_OUT = (Reserved, Refused, PrefillDone, Closed)


class AttemptLog:
    def __init__(self) -> None:
        self._is_verbose = _log.isEnabledFor(logging.DEBUG)

    def observe(self, event: Event, actions: Iterable[Action]) -> None:
        """`actions`: what the machine answered to the event."""
        if self._is_verbose and isinstance(event, FrameReceived) and isinstance(event.frame, _IN):
            _say(logging.DEBUG, event.frame.attempt_id, "%s received", type(event.frame).__name__)
        for action in actions:
            if not isinstance(action, SendFrame):
                continue
            frame = action.frame
            if isinstance(frame, Failed):
                _say(logging.WARNING, frame.attempt_id, "failed (%s): %s", frame.reason.value, frame.detail)
            elif self._is_verbose and isinstance(frame, _OUT):
                _say(logging.DEBUG, frame.attempt_id, "%s sent", type(frame).__name__)


def _say(level: int, attempt_id: int, message: str, *values: object) -> None:
    _log.log(level, f"attempt %d: {message}", attempt_id, *values, extra=about(attempt_id=attempt_id))
