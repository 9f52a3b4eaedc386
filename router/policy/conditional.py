"""Whether a prompt is computed where it decodes although it could be computed elsewhere: by the predicted cost of both ways.

    local  = TTFT there + harm_weight * running streams * seconds the prompt's own tokens take there
    remote = TTFT with a prefill worker + hand-over

The streams that run on the decode worker stand still, or step more slowly, for as long as the prompt is computed beside them. A worker
changes its way only when the other is cheaper by a margin, so that costs that are near each other do not flap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pd_serve.ids import PeerId
from router.policy.base import Demand, WorkerView
from router.policy.prediction import compute_s, local_ttft_s, remote_ttft_s


@dataclass(frozen=True, slots=True)
class ConditionalSettings:
    max_uncached_tokens: int
    """No prompt of which decode lacks more is computed there by cost."""
    margin: float
    """Share by which the other way must be cheaper before a decode worker changes."""
    harm_weight: float
    """Seconds of TTFT that one second of one running stream's pause is worth."""


class LocalOrRemote:
    """Remembers of each decode worker which way its last prompt went. `handover_s`: as measured by now."""

    def __init__(self, settings: ConditionalSettings, handover_s: Callable[[], float]) -> None:
        self._settings = settings
        self._handover_s = handover_s
        self._local: set[PeerId] = set()

    def reason(self, demand: Demand, prefill: WorkerView, decode: WorkerView) -> str:
        """Why decode computes the prompt; empty: `prefill` does, though it may have to be waited for."""
        if demand.num_uncached(decode.peer) > self._settings.max_uncached_tokens:
            return ""
        is_local = self._is_cheaper(demand, prefill, decode)
        if is_local:
            self._local.add(decode.peer)
            return self._because(demand, prefill, decode)
        self._local.discard(decode.peer)
        return ""

    def forget(self, peer: PeerId) -> None:
        self._local.discard(peer)

    def _is_cheaper(self, demand: Demand, prefill: WorkerView, decode: WorkerView) -> bool:
        """Locally, by what is asked of a change."""
        settings = self._settings
        local = local_ttft_s(decode, demand) + settings.harm_weight * decode.num_sequences * compute_s(decode, demand)
        remote = remote_ttft_s(prefill, decode, demand) + self._handover_s()
        if decode.peer in self._local:
            return local * (1.0 - settings.margin) <= remote
        return local < remote * (1.0 - settings.margin)

    def _because(self, demand: Demand, prefill: WorkerView, decode: WorkerView) -> str:
        """What, had it been otherwise, would have sent it the other way."""
        if demand.cached.get(decode.peer, 0):
            without = {prefill.peer: demand.cached.get(prefill.peer, 0)}
            if not self._is_cheaper(msgspec.structs.replace(demand, cached=without), prefill, decode):
                return "cached_on_decode"
        if prefill.prefill_backlog_tokens:
            idle = msgspec.structs.replace(prefill, prefill_backlog_tokens=0)
            if not self._is_cheaper(demand, idle, decode):
                return "load"
        return "cheaper_local"
