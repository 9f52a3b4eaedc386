"""Names of the policies."""

from __future__ import annotations

from collections.abc import Callable

from pd_serve.errors import ConfigError
from router.policy.base import Policy
from router.policy.least_tokens import LeastTokens
from router.policy.round_robin import RoundRobin

_POLICIES: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "least_tokens": LeastTokens}


def policy_names() -> tuple[str, ...]:
    return tuple(_POLICIES)


def new_policy(name: str) -> Policy:
    """Raises ConfigError for an unknown name."""
    if name not in _POLICIES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(_POLICIES)}")
    return _POLICIES[name]()
