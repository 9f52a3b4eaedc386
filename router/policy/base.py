"""What a policy sees and says. Which workers *can* take a request now is decided in candidates.py, once; a policy only ranks them.

A leg is one of the two halves of a request: the worker that computes its prompt, and the worker that generates. Each has a policy of its
own; chooser.py makes a pair of their rankings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol

import msgspec

from pd_serve.ids import PeerId
from pd_serve.protocol.link import Role

SEQUENCE_TOKENS = 64
"""A sequence costs a decode step about as much as this many context tokens: its row of every matrix product."""
NOTHING: Mapping[PeerId, int] = MappingProxyType({})
NO_BANDWIDTH: Mapping[PeerId, float] = MappingProxyType({})

Score = tuple[float, ...]
"""Of one worker for one request; the least wins. Those of one decision have the same length."""
Scorer = Callable[["WorkerView", "WorkerView | None"], Score]
"""(worker, its partner or None when that is not chosen yet) -> score."""


class RouteKind(Enum):
    """Label of pd_serve_routing_decisions_total."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


class Leg(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerView(msgspec.Struct, frozen=True):
    """One linked, compatible, not draining worker as of now."""

    peer: PeerId
    role: Role
    max_model_len: int
    num_pool_tokens: int
    """Tokens the whole pool can hold."""
    num_free_tokens: int
    """Tokens it can take in now, less what was sent there and is not yet reported."""
    prefill_backlog_tokens: int
    """Prompt tokens sent there and not yet computed."""
    decode_tokens: int
    """Tokens of the sequences it holds or was sent."""
    num_sequences: int
    joined: frozenset[PeerId]
    """Peers it can exchange KV with."""
    is_joining: bool
    """It came so lately that missing joins may still succeed."""
    short_backlog_tokens: int = 0
    """Of short prompts that were sent there from here and are not yet computed."""
    prefill_tokens_per_s: float = 1.0
    """Prompt tokens it computes per second of work, measured, or what its like do (router/throughput.py)."""
    kv_bytes_per_token: int = 0
    """Of all its ranks and layers together."""
    num_layers: int = 1
    bandwidths: Mapping[PeerId, float] = NO_BANDWIDTH
    """Bytes per second to each peer, as the probe at join measured it."""
    is_stale: bool = False
    """It has not reported for so long that its load is not known."""

    @property
    def can_decode(self) -> bool:
        return self.role is not Role.PREFILL

    def load(self, leg: Leg) -> int:
        """Tokens ahead of a request: to be computed before it, or read in every step beside it."""
        if leg is Leg.PREFILL:
            return self.prefill_backlog_tokens
        return self.decode_tokens + SEQUENCE_TOKENS * self.num_sequences


class Demand(msgspec.Struct, frozen=True):
    """What must be placed."""

    num_tokens: int
    """Prompt and tokens generated so far."""
    max_new_tokens: int
    avoid: frozenset[PeerId] = frozenset()
    """Used only where there is nothing else."""
    beside: PeerId | None = None
    """A decode worker that has the prompt in its prefix cache."""
    cached: Mapping[PeerId, int] = NOTHING
    """Of the tokens, those that a worker has in its prefix cache; workers that have none may be left out."""
    session: str = ""
    """Requests of one session go to one worker where that can be; empty: none."""

    def num_uncached(self, peer: PeerId) -> int:
        """Tokens that worker would have to compute; one at least, which gives the first token."""
        return max(1, self.num_tokens - self.cached.get(peer, 0))


class Route(msgspec.Struct, frozen=True):
    """An assignment that could be made now. `prefill` None: the prompt is computed by the decode worker."""

    prefill: WorkerView | None
    decode: WorkerView
    reason: str
    """Label of pd_serve_routing_decisions_total."""

    @property
    def kind(self) -> RouteKind:
        return RouteKind.LOCAL if self.prefill is None else RouteKind.DISAGGREGATED

    @property
    def computing(self) -> WorkerView:
        """Who computes the prompt."""
        return self.decode if self.prefill is None else self.prefill


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    local_prefill_max_tokens: int
    prefill_window_tokens: int
    """A worker with less backlog than this can start another prompt within about a step."""
    max_sequences: int
    """Sequences per decode worker."""
    short_prompt_tokens: int = 0
    """Prompts of at most so many tokens are short; a quarter of a step, or less."""
    stale_after_s: float = float("inf")
    """The load of a worker that has not reported for so long is not known."""

    @property
    def short_window_tokens(self) -> int:
        """What a step has for short prompts: all but the share of the oldest."""
        return self.prefill_window_tokens - self.prefill_window_tokens // 4


class LegPolicy(Protocol):
    """How the workers of one leg are ranked."""

    @property
    def looks_at_pairs(self) -> bool:
        """Its scores depend on the partner."""
        ...

    @property
    def reads_cached(self) -> bool:
        """It asks what workers have cached, which has to be looked up."""
        ...

    def scorer(self, workers: Sequence[WorkerView], demand: Demand) -> Scorer:
        """For one decision among these, of which there is at least one. Takes time in their number, a score none."""
        ...

    def chosen(self, worker: WorkerView) -> None:
        """The decision is made. For those that take turns."""
        ...
