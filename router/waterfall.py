"""A choice's way put together: the router's timeline and what its workers noted (GET /control/traces). Pure.

    router    |parse|queue|      reserve      |                                            |first token ...... end|
    decode                 |reserve|          |            wait for KV             |join|first step|
    prefill                                     |queue|compute ..........................|
    transfer                                          |push, layer by layer, beside compute|

All in seconds since the choice arrived, on the router's clock. Workers note moments of their own host's monotonic clock. On the router's
host that is the same clock. Any other compares only by the frames that went between: what was sent before it was received bounds the shift
between the two clocks from one side, what came back from the other; the middle is taken, and half the distance told as uncertainty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pd_serve.protocol.control import AttemptTimeline, RequestTimeline
from pd_serve.protocol.overview import AttemptWaterfall, LayerSpan, LegClock, Place, Span, Waterfall
from pd_serve.protocol.worker_traces import Leg, Told, Transfer, boot_of

NOT_KEPT = "it has forgotten this request, or did not get to its first token (observe.trace_requests says how many are kept)"


@dataclass(frozen=True, slots=True)
class Noted:
    """Of one worker: what it told, or why it did not."""

    told: Told | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ClockShift:
    """What to take off a worker's moments for seconds since the choice arrived."""

    shift_s: float
    uncertainty_s: float | None
    """0: one clock; None: bounded from one side only."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A frame between router and worker: when it was sent and received, each on its side's clock; None: not known."""

    at_router_s: float | None
    at_worker_s: float | None
    is_to_worker: bool


def clock_shift(crossings: Iterable[Crossing]) -> ClockShift | None:
    """From frames alone; None when no frame is known from both sides."""
    below: list[float] = []
    above: list[float] = []
    for crossing in crossings:
        if crossing.at_router_s is not None and crossing.at_worker_s is not None:
            (above if crossing.is_to_worker else below).append(crossing.at_worker_s - crossing.at_router_s)
    if above and below:
        least, most = max(below), min(above)
        return ClockShift((least + most) / 2, max(0.0, most - least) / 2)
    if above or below:
        return ClockShift(min(above) if above else max(below), None)
    return None


def waterfall(request: RequestTimeline, noted: Mapping[str, Noted], boot_id: str) -> Waterfall:
    """`noted`: by worker, as the timeline names it. `boot_id`: of the router's host."""
    attempts: list[AttemptWaterfall] = []
    waiting_since_s = 0.0
    for attempt in request.attempts:
        attempts.append(_Attempt(request, attempt, waiting_since_s, noted, boot_id).told())
        waiting_since_s = attempt.left_s if attempt.left_s is not None else attempt.began_s
    return Waterfall(
        choice=request.choice,
        request_id=request.request_id,
        response_id=request.response_id,
        prompt_tokens=request.prompt_tokens,
        ended_s=request.ended_s,
        outcome=request.outcome,
        attempts=tuple(attempts),
    )


class _Attempt:
    def __init__(
        self, request: RequestTimeline, attempt: AttemptTimeline, waiting_since_s: float, noted: Mapping[str, Noted], boot_id: str
    ) -> None:
        self._request = request
        self._attempt = attempt
        self._waiting_since_s = waiting_since_s
        self._noted = noted
        self._boot_id = boot_id
        self._spans: list[Span] = []
        self._legs: list[LegClock] = []

    def told(self) -> AttemptWaterfall:
        attempt, span = self._attempt, self._span
        if self._waiting_since_s == 0.0:
            span("parse, tokenize", "router", self._request.received_s, 0.0)
        span("queue", "router", self._waiting_since_s, attempt.began_s)
        span("reserve", "router", attempt.began_s, attempt.reserved_s)
        decode = self._leg_of(attempt.decode, is_prefill=False)
        prefill = self._leg_of(attempt.prefill, is_prefill=True) if attempt.prefill is not None else None
        if decode is not None:
            span("reserve", "decode", *decode.between("received_s", "reserved_s"))
        if prefill is not None:
            span("queue", "prefill", *prefill.between("received_s", "step_started_s"))
            span("compute", "prefill", *prefill.between("step_started_s", "step_ended_s"))
        layers, transfer, shift = self._layers(prefill)
        if transfer is not None:
            span("push", "transfer", min(layer.push_begin_s for layer in layers), shift + transfer.flushed_s)
        if decode is not None and attempt.prefill is not None:
            span("wait for KV", "decode", *decode.between("reserved_s", "record_s"))
            span("join", "decode", *decode.between("record_s", "step_started_s"))
            span("first step", "decode", *decode.between("step_started_s", "step_ended_s"))
        elif decode is not None:
            span("queue", "decode", *decode.between("reserved_s", "step_started_s"))
            span("compute", "decode", *decode.between("step_started_s", "step_ended_s"))
        span("tokens", "decode", attempt.first_token_s, attempt.left_s, is_tail=True)
        made = AttemptWaterfall(
            attempt_id=str(attempt.attempt_id),
            prefill=attempt.prefill,
            decode=attempt.decode,
            left_because=attempt.left_because,
            legs=tuple(self._legs),
            spans=tuple(self._spans),
        )
        if transfer is None:
            return made
        transferred = {
            "layers": layers,
            "lane": transfer.lane,
            "kv_nbytes": sum(layer.nbytes for layer in layers),
            "overlap_ratio": transfer.overlap_ratio,
            "compute_end_s": shift + transfer.compute_end_s,
            "flushed_s": shift + transfer.flushed_s,
        }
        return made.model_copy(update=transferred)

    def _span(self, name: str, place: Place, begin_s: float | None, end_s: float | None, is_tail: bool = False) -> None:
        """Nothing where an end is not known."""
        if begin_s is not None and end_s is not None:
            self._spans.append(Span(name=name, place=place, begin_s=begin_s, end_s=max(begin_s, end_s), is_tail=is_tail))

    def _leg_of(self, worker: str, is_prefill: bool) -> _PlacedLeg | None:
        noted, attempt = self._noted.get(worker, Noted(None, "it is not linked any more")), self._attempt
        leg = None if noted.told is None else noted.told.leg(attempt.attempt_id, is_prefill)
        if leg is None or noted.told is None:
            self._legs.append(LegClock(worker=worker, is_known=False, detail=noted.detail or NOT_KEPT))
            return None
        transfer = noted.told.transfer(attempt.attempt_id) if is_prefill else None
        is_same = boot_of(noted.told.host) == self._boot_id
        shift = ClockShift(self._request.arrived_at_s, 0.0) if is_same else clock_shift(self._crossings(leg, transfer))
        if shift is None:
            self._legs.append(LegClock(worker=worker, is_known=False, detail="no frame tells how its clock runs beside the router's"))
            return None
        uncertainty_s = None if is_same else shift.uncertainty_s
        self._legs.append(LegClock(worker=worker, is_known=True, detail="", is_same_clock=is_same, uncertainty_s=uncertainty_s))
        return _PlacedLeg(leg, transfer, shift.shift_s)

    def _crossings(self, leg: Leg, transfer: Transfer | None) -> tuple[Crossing, ...]:
        attempt = self._attempt
        if leg.is_prefill_leg:
            flushed_s = None if transfer is None else transfer.origin_s + transfer.flushed_s
            return (Crossing(attempt.reserved_s, leg.received_s, True), Crossing(attempt.prefilled_s, flushed_s, False))
        return (
            Crossing(attempt.began_s, leg.received_s, True),
            Crossing(attempt.reserved_s, leg.reserved_s, False),
            Crossing(attempt.first_token_s, leg.record_s, False),
        )

    def _layers(self, prefill: _PlacedLeg | None) -> tuple[tuple[LayerSpan, ...], Transfer | None, float]:
        """Each computes until the next layer's KV is written, the last one until the end of compute. Last: moment 0 of the transfer."""
        if prefill is None or prefill.transfer is None or not prefill.transfer.layers:
            return (), None, 0.0
        transfer = prefill.transfer
        origin_s = transfer.origin_s - prefill.shift_s
        ordered = sorted(transfer.layers, key=lambda layer: layer.kv_written_s)
        ends = [*(layer.kv_written_s for layer in ordered[1:]), transfer.compute_end_s]
        layers = tuple(
            LayerSpan(
                chunk=layer.chunk,
                layer=layer.layer,
                compute_begin_s=origin_s + layer.kv_written_s,
                compute_end_s=origin_s + max(end_s, layer.kv_written_s),
                push_begin_s=origin_s + layer.push_start_s,
                push_end_s=origin_s + layer.push_end_s,
                nbytes=layer.nbytes,
            )
            for layer, end_s in zip(ordered, ends, strict=True)
        )
        return layers, transfer, origin_s


@dataclass(frozen=True, slots=True)
class _PlacedLeg:
    leg: Leg
    transfer: Transfer | None
    shift_s: float

    def between(self, begin: str, end: str) -> tuple[float | None, float | None]:
        return self._at(begin), self._at(end)

    def _at(self, name: str) -> float | None:
        moment: float | None = getattr(self.leg, name)
        return None if moment is None else moment - self.shift_s
