"""One choice of a request in the dispatcher. Changed by the dispatcher only; its reader takes the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_serve.errors import PdServeError
from pd_serve.ids import AttemptId, PeerId
from pd_serve.protocol.link import FinishReason, TokenOutput
from router.lifecycle import Lifecycle
from router.moves import MoveReason
from router.policy.base import NOTHING, Demand
from router.prefixes import CachedTokens
from router.tenants import NO_TICKET, Ticket


@dataclass(slots=True, eq=False)
class Generation:
    """One choice, as its reader sees it: tokens appear in `tokens`, then one of `finish` and `error`; `wake` tells of changes, soon after
    and never from within the reader's own calls.
    """

    key: int
    num_prompt_tokens: int
    lifecycle: Lifecycle
    max_tokens: int
    wake: Callable[[], None]
    wakes_on_token: bool
    takes_what_fits: bool
    """The client named no number of tokens: `max_tokens` is what was thought to fit."""
    tokens: list[TokenOutput] = field(default_factory=list)
    finish: FinishReason | None = None
    error: PdServeError | None = None
    followers: tuple[Generation, ...] = ()
    """Choices of the same prompt that wait for this one's first token, so that its KV is sent once."""
    beside: PeerId | None = None
    cached: CachedTokens | None = None
    """What workers have of its prompt. Tokens generated since are not counted."""
    num_cached_tokens: int = 0
    """Of its prompt, where most of it was cached when it came, as far as anybody wanted to know."""
    avoid: frozenset[PeerId] = frozenset()
    reason: MoveReason = MoveReason.FIRST
    ticket: Ticket = NO_TICKET
    cost: float = 0.0
    """Tokens it was expected to take, output included, when it was queued."""
    paid: float = 0.0
    """What its tenant has been charged for it; 0: it has not started (fair.py)."""
    is_returned: bool = False
    """It was queued again after it had begun."""
    is_queued: bool = False
    has_spoken: bool = False
    """The present attempt has brought a token."""
    is_woken: bool = False
    """Its reader is about to be told."""
    attempt_id: AttemptId | None = None
    charged: tuple[PeerId, ...] = ()
    submitted_at: float = 0.0
    last_token_at: float = 0.0
    prefilled_at: float = 0.0
    """When its prompt was computed by a prefill worker; 0: not yet, or elsewhere."""
    queue_timer: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and tokens so far."""
        return self.num_prompt_tokens + self.lifecycle.num_output_tokens

    @property
    def num_to_compute(self) -> int:
        """Of these, likely."""
        return self.num_tokens - self.num_cached_tokens

    @property
    def demand(self) -> Demand:
        max_new_tokens = self.max_tokens - self.lifecycle.num_output_tokens
        cached = NOTHING if self.cached is None else self.cached
        return Demand(self.num_tokens, max_new_tokens, self.avoid, self.beside, cached, self.ticket.session)

    def charge(self, peers: tuple[PeerId, ...]) -> None:
        """It was assigned to these workers: they will have its prompt soon."""
        self.charged = peers
        if self.cached is not None:
            self.cached.expect_at(peers)

    def shrink(self, context_tokens: int) -> bool:
        """Take what fits into so many tokens, if the client leaves that to us. True when that is less than before, and not nothing."""
        max_tokens = context_tokens - self.num_prompt_tokens
        if not self.takes_what_fits or not self.lifecycle.num_output_tokens < max_tokens < self.max_tokens:
            return False
        self.max_tokens = max_tokens
        self.lifecycle.limit_output(max_tokens)
        return True


class Readers:
    """Wakes readers, each once for all that one look at the links has brought: one that is behind finds several together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._woken: list[Generation] = []

    def wake(self, generation: Generation) -> None:
        """Before the event loop's next look. On the path of every token."""
        if generation.is_woken:
            return
        generation.is_woken = True
        if not self._woken:
            self._loop.call_soon(self._wake_all)
        self._woken.append(generation)

    def _wake_all(self) -> None:
        woken, self._woken = self._woken, []
        for generation in woken:
            generation.is_woken = False
            generation.wake()
