"""When a worker's leg is left alone, when it is tried again, and what counts."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from pd_serve.config import BreakerConfig
from pd_serve.ids import PeerId
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.link import FinishReason, Role
from router.breaker import Breaker, Breakers, BreakerState
from router.generation import Generation
from router.lifecycle import Lifecycle, LifecycleSettings
from router.moves import MoveReason
from router.policy.base import Demand, Leg, WorkerView
from tests.fakes import peer_id, sampling
from tests.unit.router.routes import view

SETTINGS = BreakerConfig(failures_in_a_row=3, open_s=5.0, window_requests=4, window_s=10.0)
P0, D0, D1 = (peer_id(name) for name in ("p0", "d0", "d1"))
WORKERS = (view("p0", Role.PREFILL, (D0, D1)), view("d0", Role.DECODE, (P0,)), view("d1", Role.DECODE, (P0,)))


def opened(at: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    for key in range(3):
        breaker.failed(key, at)
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(SETTINGS)
    for key, fails in enumerate((True, True, False)):
        (breaker.failed if fails else breaker.succeeded)(key, 0.0)
    breaker.failed(3, 20.0)
    breaker.failed(4, 20.0)
    assert breaker.state(20.0) is BreakerState.CLOSED
    breaker.failed(5, 20.0)
    assert breaker.state(20.0) is BreakerState.OPEN


def test_half_of_many_requests_that_fail_open_it_too_but_not_over_a_long_time() -> None:
    breaker = Breaker(SETTINGS)
    for key in range(2):
        breaker.failed(2 * key, 0.0)
        breaker.succeeded(2 * key + 1, 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(9, 0.1)
    assert breaker.state(0.1) is BreakerState.OPEN
    slow = Breaker(SETTINGS)
    for key in range(10):
        slow.failed(2 * key, 6.0 * key)
        slow.succeeded(2 * key + 1, 6.0 * key)
    assert slow.state(60.0) is BreakerState.CLOSED


def test_one_probe_at_a_time_closes_it_or_keeps_it_open_for_longer() -> None:
    breaker = opened()
    assert not breaker.takes(4.9)
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    assert breaker.takes(5.0)
    breaker.sent(10, 5.0)
    assert not breaker.takes(5.0)
    breaker.failed(10, 6.0)
    assert not breaker.takes(15.9)
    assert breaker.takes(16.0)
    breaker.sent(11, 16.0)
    breaker.succeeded(11, 17.0)
    assert breaker.state(17.0) is BreakerState.CLOSED


def test_a_probe_that_says_nothing_makes_room_for_the_next() -> None:
    breaker = opened()
    breaker.sent(10, 5.0)
    breaker.left(10)
    assert breaker.takes(5.0)


def test_a_success_of_what_was_sent_before_it_opened_is_no_probe() -> None:
    breaker = opened()
    breaker.succeeded(2, 6.0)
    assert breaker.state(6.0) is BreakerState.HALF_OPEN


def new_breakers(*linked: PeerId) -> tuple[Breakers, Metrics]:
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    return Breakers(SETTINGS, metrics, linked or (P0, D0, D1)), metrics


def generation(key: int, *charged: PeerId, fault: tuple[MoveReason, PeerId] | None = None) -> Generation:
    lifecycle = Lifecycle(LifecycleSettings(1.0, 1.0, 3), (1, 2), sampling(), iter(range(9)).__next__)  # type: ignore[arg-type]
    lifecycle.fault = fault
    made = Generation(key, 2, lifecycle, 8, lambda: None, True, False)
    made.charged = charged
    return made


def fail(breakers: Breakers, blamed: PeerId, reason: MoveReason = MoveReason.TRANSFER, count: int = 3) -> None:
    for key in range(count):
        breakers.ended(generation(key, P0, D0, fault=(reason, blamed)), 0.0)


def names(workers: tuple[WorkerView, ...]) -> set[str]:
    return {worker.peer.worker_id for worker in workers}


def test_the_blamed_leg_is_left_alone_while_there_are_others() -> None:
    breakers, metrics = new_breakers()
    assert breakers.usable(Demand(10, 10), WORKERS, 0.0) is WORKERS
    fail(breakers, D0)
    assert names(breakers.usable(Demand(10, 10), WORKERS, 0.0)) == {"p0", "d1"}
    assert metrics.registry.get_sample_value("pd_serve_breaker_state", {"worker": "d0", "leg": "decode"}) == 2.0
    assert breakers.states(D0, 0.0) == ((Leg.DECODE, BreakerState.OPEN, 3),)
    assert breakers.states(P0, 0.0) == ()


def test_without_another_worker_that_decodes_a_broken_one_is_used() -> None:
    breakers, _ = new_breakers()
    fail(breakers, D0)
    alone = WORKERS[:2]
    assert breakers.usable(Demand(10, 10), alone, 0.0) is alone
    small = (*alone, msgspec.structs.replace(WORKERS[2], max_model_len=15))
    assert breakers.usable(Demand(10, 10), small, 0.0) is small


def test_prompts_are_computed_where_they_decode_while_the_only_prefill_worker_is_broken() -> None:
    breakers, _ = new_breakers()
    fail(breakers, P0)
    assert names(breakers.usable(Demand(10, 10), WORKERS, 0.0)) == {"d0", "d1"}


@pytest.mark.parametrize("reason", [MoveReason.NO_CAPACITY, MoveReason.PREEMPTED, MoveReason.DRAINING])
def test_what_workers_ask_for_in_good_order_is_no_failure(reason: MoveReason) -> None:
    breakers, _ = new_breakers()
    fail(breakers, D0, reason, count=20)
    assert breakers.states(D0, 0.0) == ()


def test_a_worker_whose_link_is_gone_leaves_nothing() -> None:
    breakers, metrics = new_breakers()
    fail(breakers, D0)
    breakers.forget(D0)
    assert breakers.states(D0, 0.0) == ()
    assert metrics.registry.get_sample_value("pd_serve_breaker_state", {"worker": "d0", "leg": "decode"}) is None
    others, _ = new_breakers(P0)
    fail(others, D0)
    assert others.states(D0, 0.0) == ()


def test_the_probe_is_a_real_request_and_its_first_token_closes_it() -> None:
    breakers, _ = new_breakers()
    fail(breakers, D0)
    probe = generation(7, P0, D0)
    assert names(breakers.usable(Demand(10, 10), WORKERS, 5.0)) == {"p0", "d0", "d1"}
    breakers.sent(probe, 5.0)
    assert names(breakers.usable(Demand(10, 10), WORKERS, 5.0)) == {"p0", "d1"}
    breakers.ended(generation(8, P0, D1), 5.0)
    breakers.spoke(probe, 5.5)
    assert names(breakers.usable(Demand(10, 10), WORKERS, 5.5)) == {"p0", "d0", "d1"}
    assert breakers.states(D0, 5.5) == ((Leg.DECODE, BreakerState.CLOSED, 0),)


def test_a_worker_that_fails_half_of_its_requests_is_left_alone_because_a_success_counts_once() -> None:
    breakers, _ = new_breakers()
    for key in range(4):
        if key in (1, 2):
            answered = generation(key, P0, D0)
            breakers.spoke(answered, 0.0)
            answered.finish = FinishReason.STOP
            breakers.ended(answered, 0.0)
        else:
            breakers.ended(generation(key, P0, D0, fault=(MoveReason.ENGINE, D0)), 0.0)
    assert breakers.states(D0, 0.0)[0][1] is BreakerState.OPEN


def test_an_old_stream_that_ends_says_nothing_of_its_prefill_leg() -> None:
    breakers, _ = new_breakers()
    stream = generation(9, P0, D0)
    breakers.spoke(stream, 0.0)
    fail(breakers, P0, count=2)
    stream.finish = FinishReason.STOP
    breakers.ended(stream, 1.0)
    assert breakers.states(P0, 1.0) == ((Leg.PREFILL, BreakerState.CLOSED, 2),)


def test_a_moved_request_that_ends_well_is_a_success_and_a_cancelled_one_nothing() -> None:
    breakers, _ = new_breakers()
    fail(breakers, D0)
    cancelled = generation(7, D0)
    breakers.sent(cancelled, 5.0)
    breakers.ended(cancelled, 5.0)
    assert breakers.states(D0, 5.0)[0][1] is BreakerState.HALF_OPEN
    finished = generation(8, D0)
    breakers.sent(finished, 5.0)
    breakers.spoke(finished, 5.5)
    finished.finish = FinishReason.STOP
    breakers.ended(finished, 6.0)
    assert breakers.states(D0, 6.0)[0][1] is BreakerState.CLOSED
