"""The attempts that one simulated worker has, and how it packs prompts into steps: by the real scheduler's queue."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from pd_serve.engine.scheduler_prompts import PromptQueue
from pd_serve.ids import AttemptId, PeerId
from pd_serve.plan.sim.caches import Holding
from pd_serve.plan.sim.requests import Ask


class Leg(Enum):
    PREFILL = "prefill"
    """Computes the prompt for another worker."""
    DECODE = "decode"
    """Waits for its KV, then generates."""
    LOCAL = "local"
    """Both."""


class Attempt:
    """One leg of one attempt on one worker: a prompt to PromptQueue, a sequence to DecodeBatch."""

    __slots__ = (
        "arrived_at",
        "ask",
        "attempt_id",
        "has_sent",
        "holding",
        "is_live",
        "joined_at_step",
        "last_token_at",
        "leg",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_late_before",
        "num_late_gaps",
        "num_left",
        "num_promised",
        "num_there",
        "num_tokens",
        "order",
        "steps_by_now",
        "target",
    )

    def __init__(self, attempt_id: AttemptId, ask: Ask, leg: Leg, order: int, holding: Holding, num_cached: int) -> None:
        self.attempt_id = attempt_id
        self.ask = ask
        self.leg = leg
        self.order = order
        self.holding = holding
        self.is_live = True
        """It has not been cancelled, and its worker lives."""
        self.num_tokens = ask.num_tokens
        """To be computed or received: the prompt, and what earlier attempts generated."""
        self.num_cached_tokens = num_cached
        self.num_computed_tokens = num_cached
        self.target: PeerId | None = None
        """Where a PREFILL leg sends its KV."""
        self.has_sent = False
        """Some of it, to its target."""
        self.num_there = 0
        """Tokens of it that were there from the beginning, or have been sent."""
        self.arrived_at = 0.0
        """When its KV will have arrived at the target, as far as it has been sent."""
        self.num_promised = 0
        """Output for which admission keeps room."""
        self.num_left = 0
        """Output yet to come when it joins a batch."""
        self.joined_at_step = -1
        """-1: it has not."""
        self.steps_by_now: Callable[[], int] | None = None
        """Of the worker; None: it has not spoken."""
        self.num_late_before = 0
        self.num_late_gaps = 0
        self.last_token_at = 0.0

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def num_generated(self) -> int:
        """By now, here."""
        if self.steps_by_now is None:
            return 0
        return 1 + (self.steps_by_now() - self.joined_at_step if self.joined_at_step >= 0 else 0)


Prompts = PromptQueue[Attempt]
