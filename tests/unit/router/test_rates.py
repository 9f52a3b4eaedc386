"""Token buckets: what they let through, when to come again, and that processes share them."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

from router.occupancy import SharedOccupancy, shared_block
from router.rates import Bucket, shown_duration


def bucket(limit: int = 60) -> Bucket:
    return Bucket(limit, defaultdict(float), 0)


def test_a_full_bucket_lets_a_minute_s_worth_through_and_refills_continuously() -> None:
    requests = bucket(60)
    assert [requests.take(1, 1000.0) for _ in range(60)] == [0.0] * 60
    assert requests.take(1, 1000.0) == pytest.approx(1.0)
    assert requests.remaining(1000.0) == 0
    assert requests.reset_s(1000.0) == pytest.approx(60.0)
    assert requests.take(1, 1000.9) == pytest.approx(0.1)
    assert requests.take(1, 1001.0) == 0.0
    assert requests.remaining(1031.0) == 30


def test_what_it_says_to_wait_is_enough_and_no_more() -> None:
    tokens = bucket(1000)
    assert tokens.take(900, 5.0) == 0.0
    wait_s = tokens.take(400, 5.0)
    assert tokens.take(400, 5.0 + 0.99 * wait_s) > 0
    assert tokens.take(400, 5.0 + wait_s) == 0.0


def test_an_overdraft_is_paid_back_and_what_is_given_back_counts() -> None:
    tokens = bucket(60)
    tokens.overdraw(90, 0.0)
    assert tokens.remaining(0.0) == 0
    assert tokens.take(1, 0.0) == pytest.approx(31.0)
    tokens.overdraw(-90, 0.0)
    assert tokens.remaining(0.0) == 60


def test_more_than_a_minute_s_worth_never_fits() -> None:
    assert bucket(10).take(11, 0.0) == float("inf")


def test_processes_share_one_bucket() -> None:
    block = shared_block(2, num_cells=4)
    first, second = (SharedOccupancy(block, index, 2, num_cells=4) for index in (0, 1))
    buckets = [Bucket(3, place.cells, 2, place.locked) for place in (first, second)]
    assert [one.take(1, 100.0) for one in (*buckets, buckets[0])] == [0.0] * 3
    assert buckets[1].take(1, 100.0) == pytest.approx(20.0)
    assert (first.num_open, first.num_queued) == (0, 0)
    assert first.enter(5)
    first.set_class(7, 3)
    assert (second.num_open, second.num_queued_of(7), buckets[1].remaining(100.0)) == (1, 3, 0)
    os.close(block)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0s"), (0.12, "120ms"), (1.0, "1s"), (8.64, "8.64s"), (60.0, "1m0s"), (360.0, "6m0s"), (59.9999, "1m0s")]
)
def test_durations_look_as_openai_s_do(seconds: float, shown: str) -> None:
    assert shown_duration(seconds) == shown
