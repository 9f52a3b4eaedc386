"""The pair with the fewest tokens ahead of the request: prompt tokens not yet computed on prefill, context tokens on decode."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Demand, Route

SEQUENCE_TOKENS = 64
"""A sequence costs a decode step about as much as this many context tokens: its row of every matrix product."""


class LeastTokens:
    """Both legs are chosen each by its own load; the order of routes breaks ties."""

    def choose(self, demand: Demand, routes: Sequence[Route]) -> Route:
        return min(routes, key=_load)


def _load(route: Route) -> tuple[int, int]:
    computing = route.decode if route.prefill is None else route.prefill
    decode = route.decode
    return computing.prefill_backlog_tokens, decode.decode_tokens + SEQUENCE_TOKENS * decode.num_sequences
