"""Builders for what a policy sees, and the list of all routes that the chooser spares itself: what it chooses is held against it."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.config import Config, RouterConfig, RoutingConfig
from pd_serve.ids import PeerId
from pd_serve.protocol.link import Role
from router.policy.base import Demand, Leg, Route, RoutingSettings, WorkerView
from router.policy.candidates import Candidates, are_joined
from router.policy.chooser import RouteChooser
from router.policy.conditional import LocalOrRemote
from router.policy.registry import new_policy
from tests.fakes import peer_id

SETTINGS = RoutingSettings(local_prefill_max_tokens=0, prefill_window_tokens=512, max_sequences=8)
P0, P1, D0, D1 = (peer_id(name) for name in ("p0", "p1", "d0", "d1"))


def view(name: str, role: Role, joined: tuple[PeerId, ...] = (), **fields: object) -> WorkerView:
    base: dict[str, object] = {
        "peer": peer_id(name),
        "role": role,
        "max_model_len": 2048,
        "num_pool_tokens": 4096,
        "num_free_tokens": 4096,
        "prefill_backlog_tokens": 0,
        "decode_tokens": 0,
        "num_sequences": 0,
        "joined": frozenset(joined),
        "is_joining": False,
    }
    return WorkerView(**{**base, **fields})  # type: ignore[arg-type]


def fleet(num_prefill: int, num_decode: int, **fields: object) -> tuple[WorkerView, ...]:
    """All joined with all."""
    prefills = tuple(peer_id(f"p{index}") for index in range(num_prefill))
    decodes = tuple(peer_id(f"d{index}") for index in range(num_decode))
    return (
        *(view(peer.worker_id, Role.PREFILL, decodes, **fields) for peer in prefills),
        *(view(peer.worker_id, Role.DECODE, prefills, **fields) for peer in decodes),
    )


def chooser(policy: str, settings: RoutingSettings = SETTINGS, decode: str = "", conditional: LocalOrRemote | None = None) -> RouteChooser:
    """Of one policy, or of two, without sessions."""
    return RouteChooser(new_policy(policy, Leg.PREFILL), new_policy(decode or policy, Leg.DECODE), settings, conditional)


def possible_routes(demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings) -> tuple[Route, ...]:
    """Every route that could be taken now, those with a worker to avoid only when there is no other."""
    candidates = Candidates(demand, workers, settings)
    if candidates.beside is not None:
        return (Route(None, candidates.beside, "cached"),)
    routes: list[Route] = []
    for decode in candidates.decodes:
        reason = candidates.local_reason(decode)
        if not reason:
            routes += [Route(prefill, decode, "load") for prefill in candidates.starting if are_joined(prefill, decode)]
        elif candidates.can_start(decode):
            routes.append(Route(None, decode, reason))
    clean = tuple(route for route in routes if route.decode.peer not in demand.avoid and route.computing.peer not in demand.avoid)
    return clean or tuple(routes)


def config_of(router: dict[str, object] | None = None, **routing: object) -> Config:
    return Config(router=RouterConfig.model_validate(router or {}), routing=RoutingConfig.model_validate(routing))
