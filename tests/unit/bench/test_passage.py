"""One request's way, put together from what client, router and workers noted."""

from __future__ import annotations

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.passage import FIRST_STEP, figures_of, passages_of, typical
from pd_serve.bench.records import RequestRecord
from pd_serve.protocol.control import AttemptTimeline, RequestTimeline
from pd_serve.protocol.worker_traces import LayerPush, Leg, Told, Transfer


def push(layer: int, written_s: float, end_s: float, chunk: int = 0) -> LayerPush:
    return LayerPush(chunk, layer, written_s, written_s, end_s, 100)


TRANSFER = Transfer(
    attempt_id=5,
    num_tokens=32,
    compute_end_s=4.0,
    flushed_s=4.5,
    lane="posix",
    overlap_ratio=0.75,
    layers=(push(0, 0.0, 0.5), push(1, 1.0, 1.5), push(0, 2.0, 2.5, 1), push(1, 3.0, 4.25, 1)),
    origin_s=109.0,
)
PREFILL = Leg(5, True, 107.0, None, None, 108.0, 113.0)
DECODE = Leg(5, False, 104.0, 105.0, 114.0, 115.0, 117.0)


def request(arrived_at_s: float = 102.0, attempt_id: int = 5) -> RequestTimeline:
    attempt = AttemptTimeline(
        prefill="p",
        decode="d",
        began_s=1.0,
        left_s=30.0,
        left_because="",
        output_tokens=4,
        attempt_id=attempt_id,
        reserved_s=4.0,
        prefilled_s=12.5,
        first_token_s=14.0,
    )
    return RequestTimeline(
        choice=1, prompt_tokens=32, attempts=(attempt,), received_s=-1.0, arrived_at_s=arrived_at_s, ended_s=30.0, outcome="length"
    )


def record(sent_s: float = 0.0, first_s: float = 18.0, error: str = "") -> tuple[float, RequestRecord]:
    return 100.0, RequestRecord(0, "32", 0.0, sent_s, (first_s, first_s + 1), 32, 2, 200, error, "length")


def told(host: str = "h", *, legs: tuple[Leg, ...] = (PREFILL, DECODE), transfers: tuple[Transfer, ...] = (TRANSFER,)) -> list[Told]:
    return [Told(host, transfers, legs[:1]), Told("h", (), legs[1:])]


def test_the_phases_follow_each_other_from_the_send_to_the_first_token_without_a_gap() -> None:
    (passage,) = passages_of([record()], [request()], told())
    assert [phase.seconds for phase in passage.path] == [1, 1, 1, 1, 1, 1, 1, 1, 5, 0.5, 0.5, 2, 2]
    assert all(before.end_s == after.begin_s for before, after in zip(passage.path, passage.path[1:], strict=False))
    assert passage.ttft_s == 18.0 == sum(phase.seconds for phase in passage.path)
    assert [(phase.name, phase.seconds) for phase in passage.decode] == [("join", 1.0), (FIRST_STEP, 2.0)]


def test_hand_over_is_from_the_end_of_compute_to_the_first_decode_step() -> None:
    (passage,) = passages_of([record()], [request()], told())
    assert passage.handover_s == 115.0 - 113.0


def test_exposed_transfer_is_told_in_layers_of_the_last_chunk() -> None:
    assert TRANSFER.exposed_s == 0.5
    assert TRANSFER.layer_compute_s == 1.0
    figures = figures_of(passages_of([record()], [request()], told()))
    assert figures["exposed_layers.p50"] == 0.5
    assert figures["overlap_ratio.min"] == 0.75
    assert figures["kv_bytes"] == 400.0
    assert figures["phase_s.compute"] == 5.0


def test_layers_that_go_out_together_are_still_counted_one_by_one() -> None:
    """Their KV was written one after the other, whatever they were sent with."""
    together = Transfer(5, 32, 3.0, 3.5, "posix", 1.0, (push(0, 0.0, 2.5), push(1, 1.0, 2.5), push(2, 2.0, 2.5)), 0.0)
    assert together.layer_compute_s == 1.0


@pytest.mark.parametrize(
    "lacking",
    [
        told(legs=(PREFILL,)),
        told(transfers=()),
        told(legs=(PREFILL, Leg(5, False, 104.0, 105.0, 114.0, None, None))),
        told(legs=(PREFILL, Leg(6, False, 104.0, 105.0, 114.0, 115.0, 117.0))),
    ],
)
def test_a_request_of_which_somebody_has_forgotten_a_part_is_left_out(lacking: list[Told]) -> None:
    assert passages_of([record()], [request()], lacking) == []


def test_a_request_is_found_by_the_moment_it_arrived_and_never_guessed() -> None:
    assert passages_of([record()], [request(arrived_at_s=99.0)], told()) == []
    assert passages_of([record()], [request(), request(103.0)], told()) == []
    assert passages_of([record(error="broke off")], [request()], told()) == []


def test_workers_of_different_hosts_have_no_clock_in_common() -> None:
    with pytest.raises(BenchError, match="different hosts"):
        passages_of([record()], [request()], told("another"))


def test_the_typical_request_is_the_one_in_the_middle() -> None:
    found = [passages_of([record(first_s=first)], [request()], told())[0] for first in (30.0, 18.0, 19.0)]
    assert typical(found).ttft_s == 19.0
