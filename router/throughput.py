"""How fast each worker computes prompts, as seen from here: tokens over the seconds in which it had some to compute. Used by the
dispatcher only.

    began ---- ended: 300 tokens ---- ended: 200 tokens          nothing to do            began ----
    |------------ busy ---------------------------------|                                 |--- busy

A prompt that waited behind others makes neither look slow: from one end to the next counts for what ended last. Both sums fade with the
work that is done, half in HALF_LIFE_S of it. Prompts of other routers are not seen: what is measured is what is left for this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_serve.ids import PeerId

HALF_LIFE_S = 30.0
PRIOR_WORK_S = 0.05
"""What is assumed of a worker before it has computed anything weighs as much as so much work."""
PRIOR_TOKENS_PER_S = 1000.0
"""Of the first worker: as one core computes the demo model. Only predictions of the first requests depend on it, comparisons do not."""
PRIOR_HANDOVER_S = 0.005
_HANDOVER_WEIGHT = 0.1
_STEP = math.log(1.05)
"""What is assumed of workers that were not measured moves in steps of a twentieth, lest all of them change with every prompt."""


@dataclass(slots=True)
class _Meter:
    under_way: set[int] = field(default_factory=set)
    busy_since: float = 0.0
    num_tokens: float = 0.0
    busy_s: float = 0.0
    tokens_per_s: float = 0.0
    """0: nothing was measured yet."""

    def add(self, num_tokens: float, busy_s: float, prior: float) -> None:
        fade = 0.5 ** (busy_s / HALF_LIFE_S)
        self.num_tokens = self.num_tokens * fade + num_tokens
        self.busy_s = self.busy_s * fade + busy_s
        self.tokens_per_s = (self.num_tokens + prior * PRIOR_WORK_S) / (self.busy_s + PRIOR_WORK_S)


class Throughput:
    """began -> ended or left, by a key of the caller's (one per choice). Times are monotonic seconds."""

    def __init__(self) -> None:
        self._meters: dict[PeerId, _Meter] = {}
        self._all = _Meter()
        self._usual = PRIOR_TOKENS_PER_S
        self.handover_s = PRIOR_HANDOVER_S
        """From a prompt's end at prefill to decode's first token."""
        self.changed: set[PeerId] = set()
        """Workers that were measured anew since the last look: the roster's, which empties it."""

    def began(self, peer: PeerId, key: int, now: float) -> None:
        """The worker has been given a prompt."""
        meter = self._meters.get(peer)
        if meter is None:
            meter = self._meters[peer] = _Meter()
        if not meter.under_way:
            meter.busy_since = now
        meter.under_way.add(key)

    def ended(self, peer: PeerId, key: int, num_computed_tokens: int, now: float) -> None:
        """It has computed so many tokens of it, which are those it had not cached. Ignored where the prompt is not under way."""
        meter = self._meters.get(peer)
        if meter is None or key not in meter.under_way:
            return
        meter.under_way.remove(key)
        busy_s, meter.busy_since = max(0.0, now - meter.busy_since), now
        meter.add(num_computed_tokens, busy_s, self._usual)
        self.changed.add(peer)
        self._all.add(num_computed_tokens, busy_s, PRIOR_TOKENS_PER_S)
        steps = math.log(max(1e-3, self._all.tokens_per_s)) / _STEP
        if abs(steps - math.log(self._usual) / _STEP) >= 1.0:
            self._usual = math.exp(round(steps) * _STEP)

    def left(self, peer: PeerId, key: int, now: float) -> None:
        """It will not be finished there; what was done meanwhile is not known, and not counted. Idempotent."""
        meter = self._meters.get(peer)
        if meter is not None and key in meter.under_way:
            meter.under_way.remove(key)
            meter.busy_since = now

    def handed_over(self, seconds: float) -> None:
        self.handover_s += _HANDOVER_WEIGHT * (max(0.0, seconds) - self.handover_s)

    def forget(self, peer: PeerId) -> None:
        self._meters.pop(peer, None)
        self.changed.discard(peer)

    @property
    def usual_tokens_per_s(self) -> float:
        """Of a worker that was not measured."""
        return self._usual

    def is_measured(self, peer: PeerId) -> bool:
        meter = self._meters.get(peer)
        return meter is not None and meter.tokens_per_s > 0

    def tokens_per_s(self, peer: PeerId) -> float:
        """Measured, or what is usual here."""
        meter = self._meters.get(peer)
        return (meter.tokens_per_s if meter is not None else 0.0) or self._usual

    def is_idle(self) -> bool:
        """No prompt is under way anywhere."""
        return not any(meter.under_way for meter in self._meters.values())
