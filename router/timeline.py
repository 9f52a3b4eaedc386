"""Where recent requests were served, and why they moved: for GET /internal/v1/requests and the log. Used by the dispatcher only.

One record per choice, from its arrival to its end; the newest NUM_KEPT are kept. Times are seconds since the choice arrived.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_serve.ids import PeerId
from pd_serve.observe import about
from pd_serve.protocol.control import AttemptTimeline, RecentRequests, RequestTimeline

logger = logging.getLogger(__name__)

NUM_KEPT = 256


@dataclass(slots=True)
class _Attempt:
    prefill: PeerId | None
    decode: PeerId
    began_at: float
    attempt_id: int
    reserved_at: float | None = None
    prefilled_at: float | None = None
    first_token_at: float | None = None
    left_at: float | None = None
    num_output_tokens: int = 0
    left_because: str = ""


@dataclass(slots=True)
class Record:
    key: int
    num_prompt_tokens: int
    arrived_at: float
    received_at: float
    request_id: str = ""
    response_id: str = ""
    traceparent: str = ""
    """As the client gave it; empty: none, or nobody traces."""
    num_output_tokens: int = 0
    attempts: list[_Attempt] = field(default_factory=list)
    ended_at: float | None = None
    outcome: str = ""

    @property
    def first_token_at(self) -> float | None:
        return next((attempt.first_token_at for attempt in self.attempts if attempt.first_token_at is not None), None)


class Timeline:
    """arrived -> (assigned -> reserved -> first token, prefilled -> left)* -> ended. Times passed in are monotonic seconds."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=NUM_KEPT)
        self._open: dict[int, Record] = {}
        self.on_end: Callable[[Record], None] = _nobody
        """Called with every record that has ended, within the dispatcher's calls: it must be quick and raise nothing."""

    def arrived(self, key: int, num_prompt_tokens: int, now: float, received_at: float = 0.0) -> None:
        """`received_at`: when its HTTP request began to come in; 0: not known."""
        self._open[key] = record = Record(key, num_prompt_tokens, now, received_at or now)
        self._records.append(record)

    def named(self, key: int, request_id: str, response_id: str = "", traceparent: str = "") -> Record | None:
        """The choice belongs to this request of a client. Its record, to be told later; None: it is over already."""
        record = self._open.get(key)
        if record is not None:
            record.request_id, record.response_id, record.traceparent = request_id, response_id, traceparent
        return record

    def assigned(self, key: int, prefill: PeerId | None, decode: PeerId, now: float, attempt_id: int = 0) -> None:
        self._open[key].attempts.append(_Attempt(prefill, decode, now, attempt_id))

    def reserved(self, key: int, now: float) -> None:
        if attempts := self._open[key].attempts:
            attempts[-1].reserved_at = now

    def prefilled(self, key: int, now: float) -> None:
        if attempts := self._open[key].attempts:
            attempts[-1].prefilled_at = now

    def first_token(self, key: int, now: float) -> None:
        if attempts := self._open[key].attempts:
            attempts[-1].first_token_at = now

    def left(self, key: int, reason: str, num_output_tokens: int, now: float) -> None:
        """The choice left its attempt, with so many tokens so far, and is about to be placed again."""
        record = self._open[key]
        if not record.attempts:
            return
        attempt = record.attempts[-1]
        attempt.left_at, attempt.left_because, attempt.num_output_tokens = now, reason, num_output_tokens
        where, lasted_s = _pair(attempt), now - attempt.began_at
        line = (key, attempt.attempt_id, where, reason, lasted_s, num_output_tokens)
        ids = about(record.request_id, record.response_id, attempt.attempt_id, key)
        logger.info("choice %d, attempt %d, leaves %s (%s) after %.3f s with %d tokens so far", *line, extra=ids)

    def is_using(self, peer: PeerId) -> bool:
        """Something that was sent to the worker may still run there."""
        latest = (record.attempts[-1] for record in self._open.values() if record.attempts)
        here = (attempt for attempt in latest if attempt.left_at is None)
        return any(attempt.decode == peer or (attempt.prefill == peer and attempt.prefilled_at is None) for attempt in here)

    def ended(self, key: int, outcome: str, num_output_tokens: int, now: float) -> None:
        record = self._open.pop(key)
        record.ended_at, record.outcome, record.num_output_tokens = now, outcome, num_output_tokens
        if record.attempts and record.attempts[-1].left_at is None:
            record.attempts[-1].left_at, record.attempts[-1].num_output_tokens = now, num_output_tokens
        self.on_end(record)

    def recent(self) -> RecentRequests:
        """Newest first."""
        return RecentRequests(requests=tuple(told(record) for record in reversed(self._records)))


def told(record: Record) -> RequestTimeline:
    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else round(moment - record.arrived_at, 6)

    return RequestTimeline(
        choice=record.key,
        prompt_tokens=record.num_prompt_tokens,
        attempts=tuple(
            AttemptTimeline(
                prefill=None if attempt.prefill is None else str(attempt.prefill),
                decode=str(attempt.decode),
                began_s=round(attempt.began_at - record.arrived_at, 6),
                left_s=since_arrival(attempt.left_at),
                left_because=attempt.left_because,
                output_tokens=attempt.num_output_tokens,
                attempt_id=attempt.attempt_id,
                reserved_s=since_arrival(attempt.reserved_at),
                prefilled_s=since_arrival(attempt.prefilled_at),
                first_token_s=since_arrival(attempt.first_token_at),
            )
            for attempt in record.attempts
        ),
        received_s=round(record.received_at - record.arrived_at, 6),
        arrived_at_s=record.arrived_at,
        ended_s=since_arrival(record.ended_at),
        outcome=record.outcome,
        request_id=record.request_id,
        response_id=record.response_id,
    )


def _nobody(record: Record) -> None:
    return None


def _pair(attempt: _Attempt) -> str:
    return str(attempt.decode) if attempt.prefill is None else f"{attempt.prefill} and {attempt.decode}"
