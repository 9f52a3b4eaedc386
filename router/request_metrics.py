"""What a choice's record says when it has ended, as metrics and, if asked for, as one log line. Once per choice; nothing per token."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pd_serve.observe import Metrics, about
from router.timeline import Record

logger = logging.getLogger(__name__)


class RequestMetrics:
    """The timeline's on_end. `then`: whoever else wants the record."""

    def __init__(self, metrics: Metrics, logs_requests: bool, then: Callable[[Record], None] | None = None) -> None:
        self._queue = metrics.histogram("pd_serve_queue_seconds")
        self._per_token = metrics.histogram("pd_serve_time_per_output_token_seconds")
        self._prompt = metrics.histogram("pd_serve_request_prompt_tokens")
        self._generated = metrics.histogram("pd_serve_request_generated_tokens")
        self._logs_requests = logs_requests
        self._then = then

    def ended(self, record: Record) -> None:
        attempts, num_tokens = record.attempts, record.num_output_tokens
        self._prompt.observe(record.num_prompt_tokens)
        self._generated.observe(num_tokens)
        if attempts:
            self._queue.observe(attempts[0].began_at - record.arrived_at)
            if num_tokens > 1 and record.ended_at is not None and (first := record.first_token_at) is not None:
                self._per_token.observe((record.ended_at - first) / (num_tokens - 1))
        if self._logs_requests:
            _log(record)
        if self._then is not None:
            self._then(record)


def _log(record: Record) -> None:
    last = record.attempts[-1] if record.attempts else None
    ids = about(record.request_id, record.response_id, last.attempt_id if last is not None else 0, record.key)
    first, ended = record.first_token_at, record.ended_at or record.arrived_at
    logger.info(
        "choice %d ended: %s; %d prompt tokens, %d generated, %d moves, first token after %s, %.3f s in all",
        record.key,
        record.outcome,
        record.num_prompt_tokens,
        record.num_output_tokens,
        max(0, len(record.attempts) - 1),
        "none" if first is None else f"{first - record.arrived_at:.3f} s",
        ended - record.arrived_at,
        extra=ids,
    )
