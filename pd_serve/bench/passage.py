"""One disaggregated request's way from the client's send to its first tokens: the pure part of `bench handover`.

    client   |HTTP in|                                                                                  |first byte|
    router           |parse, tokenize|choose|      |      |                                   |to router|
    decode                                  |open|reserve|                              |record|join|first step|
    prefill                                               |to prefill|queue|compute ....|flush|
    transfer                                                               |layer by layer, beside compute|

Every moment is on the monotonic clock of the one host on which client, router and workers run; on several hosts there is no such clock, and
nothing here is computed (passages_of raises). Hand-over: from the end of prefill's compute to the start of the first decode step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pd_serve.bench.errors import BenchError
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.statistics import percentile
from pd_serve.protocol.control import RequestTimeline
from pd_serve.protocol.worker_traces import Leg, Told, Transfer


@dataclass(frozen=True, slots=True)
class Phase:
    """One piece of the way; the pieces of `Passage.path` follow each other without a gap."""

    name: str
    place: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Passage:
    """One request. `path`: what its first token waited for, from the send to its arrival; `decode`: what decode did meanwhile and after."""

    num_tokens: int
    path: tuple[Phase, ...]
    decode: tuple[Phase, ...]
    transfer: Transfer

    @property
    def ttft_s(self) -> float:
        return self.path[-1].end_s - self.path[0].begin_s

    @property
    def compute_end_s(self) -> float:
        return next(phase.end_s for phase in self.path if phase.name == COMPUTE)

    @property
    def handover_s(self) -> float:
        return next(phase.begin_s for phase in self.decode if phase.name == FIRST_STEP) - self.compute_end_s


COMPUTE, FIRST_STEP = "compute", "first decode step"


def passages_of(records: Iterable[tuple[float, RequestRecord]], requests: Sequence[RequestTimeline], told: Sequence[Told]) -> list[Passage]:
    """Join what client, router and workers noted. `records`: (start of the run as a moment, record) of requests sent one at a time;
    those that did not run disaggregated, or of which somebody has forgotten a part, are left out.

    Raises BenchError when the workers are on several hosts.
    """
    if len({one.host for one in told}) > 1:
        raise BenchError("the workers are on different hosts: their moments cannot be compared; run handover on one host")
    prefill_legs = {leg.attempt_id: leg for one in told for leg in one.attempts if leg.is_prefill_leg}
    decode_legs = {leg.attempt_id: leg for one in told for leg in one.attempts if not leg.is_prefill_leg}
    transfers = {transfer.attempt_id: transfer for one in told for transfer in one.traces}
    passages: list[Passage] = []
    for start, record in records:
        if not record.ok or not record.token_s:
            continue
        request = _request_of(requests, start + record.sent_s, start + record.token_s[0])
        if request is None:
            continue
        attempt_id = request.attempts[-1].attempt_id
        legs = (decode_legs.get(attempt_id), prefill_legs.get(attempt_id), transfers.get(attempt_id))
        passage = _passage((start + record.sent_s, start + record.token_s[0]), request, *legs)
        if passage is not None:
            passages.append(passage)
    return passages


def figures_of(passages: Sequence[Passage]) -> dict[str, float]:
    """Of passages of one prompt length: hand-over, overlap, exposed transfer, and the median of each phase, seconds."""
    transfers = [passage.transfer for passage in passages]
    figures: dict[str, float] = {"requests": float(len(passages))}
    sets = {
        "handover_s": [passage.handover_s for passage in passages],
        "exposed_s": [transfer.exposed_s for transfer in transfers],
        "exposed_layers": [transfer.exposed_s / transfer.layer_compute_s for transfer in transfers],
    }
    for name, values in sets.items():
        figures |= {f"{name}.p50": percentile(values, 50), f"{name}.p99": percentile(values, 99), f"{name}.max": max(values, default=0.0)}
    overlaps = [transfer.overlap_ratio for transfer in transfers]
    figures |= {"overlap_ratio.p50": percentile(overlaps, 50), "overlap_ratio.min": min(overlaps, default=0.0)}
    figures["layer_compute_s.p50"] = percentile([transfer.layer_compute_s for transfer in transfers], 50)
    figures["kv_bytes"] = float(max((sum(layer.nbytes for layer in transfer.layers) for transfer in transfers), default=0))
    return figures | {f"phase_s.{name}": seconds for name, seconds in median_phases(passages).items()}


def median_phases(passages: Sequence[Passage]) -> Mapping[str, float]:
    """In the order of the way. The medians do not add up to the median of the whole."""
    seconds: dict[str, list[float]] = {}
    for passage in passages:
        for phase in (*passage.path, *passage.decode):
            seconds.setdefault(phase.name, []).append(phase.seconds)
    return {name: percentile(values, 50) for name, values in seconds.items()}


def typical(passages: Sequence[Passage]) -> Passage:
    """The one in the middle by TTFT. Precondition: there is one."""
    return sorted(passages, key=lambda passage: passage.ttft_s)[len(passages) // 2]


def _request_of(requests: Sequence[RequestTimeline], sent: float, first: float) -> RequestTimeline | None:
    """The one that arrived at the router between the send and the first token."""
    found = [request for request in requests if sent <= request.arrived_at_s <= first and request.attempts]
    return found[0] if len(found) == 1 else None


def _passage(
    client: tuple[float, float], request: RequestTimeline, decode: Leg | None, prefill: Leg | None, transfer: Transfer | None
) -> Passage | None:
    attempt = request.attempts[-1]
    if decode is None or prefill is None or transfer is None or not transfer.layers:
        return None

    def at(seconds: float | None) -> float | None:
        return None if seconds is None else request.arrived_at_s + seconds

    stations = (
        ("", "", client[0]),
        ("to the router", "client", at(request.received_s)),
        ("parse, tokenize", "router", request.arrived_at_s),
        ("choose", "router", at(attempt.began_s)),
        ("open to decode", "link", decode.received_s),
        ("reserve", "decode", decode.reserved_s),
        ("reserved to router", "link", at(attempt.reserved_s)),
        ("prefill to worker", "link", prefill.received_s),
        ("queue", "prefill", prefill.step_started_s),
        (COMPUTE, "prefill", prefill.step_ended_s),
        ("flush", "transfer", transfer.origin_s + transfer.flushed_s),
        ("record", "transfer", decode.record_s),
        ("token to router", "link", at(attempt.first_token_s)),
        ("token to client", "client", client[1]),
    )
    path = _phases(stations)
    after = _phases((("", "", decode.record_s), ("join", "decode", decode.step_started_s), (FIRST_STEP, "decode", decode.step_ended_s)))
    if path is None or after is None:
        return None
    return Passage(transfer.num_tokens, path, after, transfer)


def _phases(stations: Sequence[tuple[str, str, float | None]]) -> tuple[Phase, ...] | None:
    """Each ends at its moment and begins at the one before; None when a moment is missing."""
    phases: list[Phase] = []
    for (_, _, begin), (name, place, end) in itertools.pairwise(stations):
        if begin is None or end is None:
            return None
        phases.append(Phase(name, place, begin, end))
    return tuple(phases)
