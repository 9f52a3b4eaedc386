"""What a policy sees and says. Which workers *can* take a request now is decided here, once; a policy only picks among them.

A pair is a candidate when its prefill has joined its decode, neither is draining, the request fits, and the worker that computes the prompt
could start it within about a step: the queue lives in the router, so that no reserved block waits one out. A short prompt is started in the
next step however long the others are (pd_serve.engine.scheduler_prompts): only those as short count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from pd_serve.ids import PeerId
from pd_serve.protocol.link import Role


class RouteKind(Enum):
    """Label of pd_serve_routing_decisions_total."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


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

    @property
    def can_decode(self) -> bool:
        return self.role is not Role.PREFILL


class Demand(msgspec.Struct, frozen=True):
    """What must be placed."""

    num_tokens: int
    """Prompt and tokens generated so far."""
    max_new_tokens: int
    avoid: frozenset[PeerId] = frozenset()
    """Used only where there is nothing else."""
    beside: PeerId | None = None
    """A decode worker that has the prompt in its prefix cache."""


class Route(msgspec.Struct, frozen=True):
    """An assignment that could be made now. `prefill` None: the prompt is computed by the decode worker."""

    prefill: WorkerView | None
    decode: WorkerView
    reason: str
    """Label of pd_serve_routing_decisions_total."""

    @property
    def kind(self) -> RouteKind:
        return RouteKind.LOCAL if self.prefill is None else RouteKind.DISAGGREGATED


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    local_prefill_max_tokens: int
    prefill_window_tokens: int
    """A worker with less backlog than this can start another prompt within about a step."""
    max_sequences: int
    """Sequences per decode worker."""
    short_prompt_tokens: int = 0
    """Prompts of at most so many tokens are short; a quarter of a step, or less."""

    @property
    def short_window_tokens(self) -> int:
        """What a step has for short prompts: all but the share of the oldest."""
        return self.prefill_window_tokens - self.prefill_window_tokens // 4


class Policy(Protocol):
    def choose(self, demand: Demand, routes: Sequence[Route]) -> Route:
        """Pick one of at least one route."""
        ...


def possible_routes(demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings) -> tuple[Route, ...]:
    """Every route that could be taken now, those with a worker to avoid only when there is no other."""
    routes = tuple(_routes(demand, workers, settings))
    clean = tuple(
        route
        for route in routes
        if route.decode.peer not in demand.avoid and (route.prefill is None or route.prefill.peer not in demand.avoid)
    )
    return clean or routes


def _routes(demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings) -> list[Route]:
    decodes = [worker for worker in workers if _can_hold(demand, worker, settings)]
    beside = [worker for worker in decodes if worker.peer == demand.beside]
    if beside:
        return [Route(None, beside[0], "cached")]
    prefills = [worker for worker in workers if worker.role is Role.PREFILL and _can_compute(demand, worker)]
    routes: list[Route] = []
    for decode in decodes:
        pairs = [prefill for prefill in prefills if decode.peer in prefill.joined and prefill.peer in decode.joined]
        local_reason = _local_reason(demand, decode, prefills, pairs, settings)
        if local_reason:
            if _can_start(demand, decode, settings):
                routes.append(Route(None, decode, local_reason))
            continue
        routes += [Route(prefill, decode, "load") for prefill in pairs if _can_start(demand, prefill, settings)]
    return routes


def _local_reason(
    demand: Demand, decode: WorkerView, prefills: Sequence[WorkerView], pairs: Sequence[WorkerView], settings: RoutingSettings
) -> str:
    """Why the prompt is computed where it decodes; empty: it is not."""
    if decode.role is Role.BOTH and not pairs:
        return "colocated"
    if not prefills:
        return "no_prefill_worker"
    if demand.num_tokens <= settings.local_prefill_max_tokens:
        return "short_prompt"
    if not pairs and not decode.is_joining and not any(prefill.is_joining for prefill in prefills):
        return "no_joined_pair"
    return ""


def _can_hold(demand: Demand, worker: WorkerView, settings: RoutingSettings) -> bool:
    return (
        worker.can_decode
        and demand.num_tokens + demand.max_new_tokens <= worker.max_model_len
        and demand.num_tokens < worker.num_free_tokens
        and worker.num_sequences < settings.max_sequences
    )


def _can_start(demand: Demand, worker: WorkerView, settings: RoutingSettings) -> bool:
    if worker.prefill_backlog_tokens < settings.prefill_window_tokens:
        return True
    is_short = demand.num_tokens <= settings.short_prompt_tokens
    return is_short and worker.short_backlog_tokens + demand.num_tokens <= settings.short_window_tokens


def waits_for_compute_only(demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings) -> bool:
    """Whether there were a route if no prompt was being computed anywhere: nothing that others take meanwhile is missing."""
    return bool(possible_routes(demand, [msgspec.structs.replace(worker, prefill_backlog_tokens=0) for worker in workers], settings))


def _can_compute(demand: Demand, worker: WorkerView) -> bool:
    """A prefill worker refuses what it could not finish by itself."""
    return demand.num_tokens + demand.max_new_tokens <= worker.max_model_len and demand.num_tokens < worker.num_pool_tokens
