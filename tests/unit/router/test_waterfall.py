"""A choice's way put together, on one host and over clocks that do not compare."""

from __future__ import annotations

import pytest

from pd_serve.protocol.control import AttemptTimeline, RequestTimeline
from pd_serve.protocol.overview import AttemptWaterfall
from pd_serve.protocol.worker_traces import LayerPush, Leg, Told, Transfer
from router.waterfall import ClockShift, Crossing, Noted, clock_shift, waterfall

BOOT = "boot"
P, D = "p@1", "d@1"


def request(attempt_id: int = 9, prefill: str | None = P) -> RequestTimeline:
    attempt = AttemptTimeline(
        prefill=prefill,
        decode=D,
        began_s=0.010,
        left_s=1.0,
        left_because="",
        output_tokens=20,
        attempt_id=attempt_id,
        reserved_s=0.014,
        prefilled_s=0.112,
        first_token_s=0.114,
    )
    return RequestTimeline(
        choice=3, prompt_tokens=64, attempts=(attempt,), received_s=-0.002, arrived_at_s=500.0, ended_s=1.0, outcome="stop", request_id="r"
    )


def noted(shift_s: float = 0.0, host: str = f"{BOOT} ipc pid") -> dict[str, Noted]:
    """Frames take 1 ms each way; `shift_s`: of the workers' clock from the router's."""
    zero = 500.0 + shift_s
    prefill = Leg(9, True, zero + 0.015, None, None, zero + 0.020, zero + 0.110)
    layers = tuple(LayerPush(0, layer, 0.03 * layer, 0.03 * layer, 0.03 * layer + 0.02, 100) for layer in range(3))
    transfer = Transfer(9, 64, 0.090, 0.091, "shm", 1.0, layers, zero + 0.020)
    decode = Leg(9, False, zero + 0.011, zero + 0.013, zero + 0.113, zero + 0.1135, zero + 0.120)
    return {P: Noted(Told(host, (transfer,), (prefill,))), D: Noted(Told(host, (), (decode,)))}


def spans(attempt: AttemptWaterfall) -> dict[tuple[str, str], tuple[float, float]]:
    return {(span.place, span.name): (round(span.begin_s, 4), round(span.end_s, 4)) for span in attempt.spans}


def test_every_phase_is_in_seconds_since_the_request_arrived() -> None:
    told = waterfall(request(), noted(), BOOT)
    (attempt,) = told.attempts
    assert (told.request_id, told.prompt_tokens, told.outcome, attempt.attempt_id) == ("r", 64, "stop", "9")
    assert spans(attempt) == {
        ("router", "parse, tokenize"): (-0.002, 0.0),
        ("router", "queue"): (0.0, 0.01),
        ("router", "reserve"): (0.01, 0.014),
        ("decode", "reserve"): (0.011, 0.013),
        ("prefill", "queue"): (0.015, 0.02),
        ("prefill", "compute"): (0.02, 0.11),
        ("transfer", "push"): (0.02, 0.111),
        ("decode", "wait for KV"): (0.013, 0.113),
        ("decode", "join"): (0.113, 0.1135),
        ("decode", "first step"): (0.1135, 0.12),
        ("decode", "tokens"): (0.114, 1.0),
    }
    assert [span.name for span in attempt.spans if span.is_tail] == ["tokens"]
    assert [leg.is_same_clock for leg in attempt.legs] == [True, True]


def test_a_layer_computes_until_the_next_one_s_kv_is_written() -> None:
    (attempt,) = waterfall(request(), noted(), BOOT).attempts
    assert [layer.layer for layer in attempt.layers] == [0, 1, 2]
    assert [round(layer.compute_begin_s, 4) for layer in attempt.layers] == [0.02, 0.05, 0.08]
    assert [round(layer.compute_end_s, 4) for layer in attempt.layers] == [0.05, 0.08, 0.11]
    assert [round(layer.push_end_s, 4) for layer in attempt.layers] == [0.04, 0.07, 0.1]
    assert (attempt.lane, attempt.kv_nbytes, attempt.overlap_ratio) == ("shm", 300, 1.0)
    assert (attempt.compute_end_s, attempt.flushed_s) == pytest.approx((0.11, 0.111))


@pytest.mark.parametrize("shift_s", [-1e6, 12345.678])
def test_moments_of_another_host_are_placed_by_the_frames_between(shift_s: float) -> None:
    (attempt,) = waterfall(request(), noted(shift_s, "other ipc pid"), BOOT).attempts
    (here,) = waterfall(request(), noted(), BOOT).attempts
    placed, known = spans(attempt), spans(here)
    for leg in attempt.legs:
        assert not leg.is_same_clock
        assert leg.uncertainty_s is not None
        assert leg.uncertainty_s == pytest.approx(0.001, abs=1e-6)
    for key, (begin, end) in known.items():
        assert placed[key] == pytest.approx((begin, end), abs=0.0011), key


def test_a_frame_that_went_one_way_only_bounds_nothing_else() -> None:
    assert clock_shift((Crossing(1.0, 101.5, True),)) == ClockShift(100.5, None)
    assert clock_shift((Crossing(1.0, None, True), Crossing(None, 5.0, False))) is None


def test_crossings_bound_the_shift_from_both_sides() -> None:
    crossings = (Crossing(1.0, 101.5, True), Crossing(2.0, 102.0, False), Crossing(3.0, 103.25, True))
    assert clock_shift(crossings) == ClockShift(100.125, 0.125)


def test_what_a_worker_did_not_tell_is_said_and_the_rest_is_shown() -> None:
    known = noted()
    known[D] = Noted(None, "its traces are not to be had")
    (attempt,) = waterfall(request(), known, BOOT).attempts
    assert [(leg.worker, leg.is_known, leg.detail) for leg in attempt.legs] == [(D, False, "its traces are not to be had"), (P, True, "")]
    assert ("prefill", "compute") in spans(attempt)
    assert not [span for span in attempt.spans if span.place == "decode" and not span.is_tail]


def test_a_forgotten_attempt_and_a_lost_worker_are_told_apart() -> None:
    (attempt,) = waterfall(request(attempt_id=10), {D: noted()[D]}, BOOT).attempts
    assert "forgotten" in attempt.legs[0].detail
    assert "not linked" in attempt.legs[1].detail
    assert attempt.layers == ()
    assert attempt.overlap_ratio is None


def test_what_is_prefilled_where_it_decodes_has_one_leg() -> None:
    (attempt,) = waterfall(request(prefill=None), {D: noted()[D]}, BOOT).attempts
    assert [leg.worker for leg in attempt.legs] == [D]
    assert ("decode", "compute") in spans(attempt)
    assert ("decode", "wait for KV") not in spans(attempt)
