"""What is to be sent and what came back: the records that every measurement of an endpoint is made of. Both go to files as JSON lines."""

from __future__ import annotations

import msgspec


class RequestPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request, complete: two arms that replay the same plans are sent the same bytes."""

    index: int
    kind: str
    """What the request is in its measurement, such as `victim` or `long`; records are summed up by kind."""
    at_s: float
    """Seconds after the start of the run; 0 in a closed loop."""
    prompt: tuple[int, ...] | str
    """Token ids, or text."""
    max_tokens: int
    session: str = ""
    hash_ids: tuple[int, ...] = ()
    """Of a trace: one id per block of the prompt, equal ids for equal content."""


class RequestRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request as its client saw it. All times are seconds after the start of the run, on the client's monotonic clock."""

    index: int
    kind: str
    planned_s: float
    sent_s: float
    """When the first byte was handed to the socket layer; `sent_s - planned_s` is how late an open loop was."""
    token_s: tuple[float, ...]
    """When each token arrived. Tokens that came in one piece share their time."""
    num_prompt_tokens: int
    num_output_tokens: int
    """As the server counts where it says so, else the number of arrivals."""
    status: int
    """Of HTTP; 0 when no answer came."""
    error: str
    """Empty: the answer is whole."""
    finish_reason: str
    num_cached_tokens: int = -1
    """Prompt tokens the server found cached; -1: it does not say."""

    @property
    def ok(self) -> bool:
        return not self.error
