"""Names of the policies, and what the settings make of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from pd_serve.config import Config, RoutingConfig
from pd_serve.errors import ConfigError
from router.policy.base import Leg, LegPolicy, RoutingSettings
from router.policy.cache_aware import BalanceSettings, CacheAware
from router.policy.chooser import RouteChooser
from router.policy.conditional import ConditionalSettings, LocalOrRemote
from router.policy.least_tokens import LeastTokens
from router.policy.least_ttft import LeastTTFT
from router.policy.power_of_two import PowerOfTwo
from router.policy.round_robin import RoundRobin
from router.policy.session import SessionAffinity

_POLICIES: dict[str, Callable[[Leg, RoutingConfig], LegPolicy]] = {
    "round_robin": lambda leg, config: RoundRobin(),
    "least_tokens": lambda leg, config: LeastTokens(leg),
    "power_of_two": lambda leg, config: PowerOfTwo(leg, random.Random(f"{config.seed} {leg.value}")),
    "cache_aware": lambda leg, config: CacheAware(leg, BalanceSettings(config.balance_tokens, config.balance_ratio)),
    "least_ttft": lambda leg, config: LeastTTFT(leg),
}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def new_policy(name: str, leg: Leg, config: RoutingConfig | None = None) -> LegPolicy:
    """Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(_POLICIES)}")
    return _POLICIES[name](leg, config or RoutingConfig())


def routing_settings(config: Config) -> RoutingSettings:
    return RoutingSettings(
        local_prefill_max_tokens=config.router.local_prefill_max_tokens,
        prefill_window_tokens=config.engine.max_batch_tokens,
        max_sequences=config.engine.max_running,
        short_prompt_tokens=config.engine.max_batch_tokens // 4,
        stale_after_s=config.routing.stale_reports * config.worker.report_interval_s,
    )


def new_chooser(config: Config, handover_s: Callable[[], float]) -> RouteChooser:
    """As configured. `handover_s`: as measured by now. Raises ConfigError."""
    router, routing = config.router, config.routing

    def leg_policy(name: str, leg: Leg) -> LegPolicy:
        policy = new_policy(router.policy if name == "default" else name, leg, routing)
        return SessionAffinity(policy, leg, routing.session_max_ratio, routing.balance_tokens) if routing.session_header else policy

    conditional = None
    if routing.local_max_uncached_tokens:
        costs = ConditionalSettings(routing.local_max_uncached_tokens, routing.local_margin, routing.local_harm_weight)
        conditional = LocalOrRemote(costs, handover_s)
    prefill, decode = leg_policy(router.prefill_policy, Leg.PREFILL), leg_policy(router.decode_policy, Leg.DECODE)
    return RouteChooser(prefill, decode, routing_settings(config), conditional)
