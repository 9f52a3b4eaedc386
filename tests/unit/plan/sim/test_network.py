"""Transfers against cases worked out by hand: 1 GB/s, so a megabyte takes a millisecond."""

from __future__ import annotations

import pytest

from pd_serve.plan.sim.network import LinkSpec, Nic, transfer

MB = 1_000_000
PLAIN = LinkSpec(1e9, 0.0, is_layerwise=False)
LAYERWISE = LinkSpec(1e9, 0.0)


def test_without_overlap_it_begins_with_the_end_of_compute() -> None:
    assert transfer(PLAIN, Nic(), Nic(), 10 * MB, (0.0, 0.050), 10, True) == pytest.approx(0.060)


def test_compute_hides_all_but_the_last_layer() -> None:
    """10 layers of 5 ms: the first is there at 5 ms, the last at 50 ms, and crosses in 1 ms."""
    assert transfer(LAYERWISE, Nic(), Nic(), 10 * MB, (0.0, 0.050), 10, True) == pytest.approx(0.051)


def test_a_slow_link_hides_all_but_the_first_layer() -> None:
    """100 MB over 100 ms, from 5 ms on."""
    assert transfer(LAYERWISE, Nic(), Nic(), 100 * MB, (0.0, 0.050), 10, True) == pytest.approx(0.105)


def test_setup_is_paid_once_for_each_request() -> None:
    link = LinkSpec(1e9, 0.002, is_layerwise=False)
    source, target = Nic(), Nic()
    assert transfer(link, source, target, 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.012)
    assert transfer(link, source, target, 10 * MB, (0.0, 0.0), 10, False) == pytest.approx(0.022)


def test_two_from_one_worker_share_its_line_out() -> None:
    source = Nic()
    assert transfer(PLAIN, source, Nic(), 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.010)
    assert transfer(PLAIN, source, Nic(), 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.020)


def test_two_to_one_worker_share_its_line_in() -> None:
    target = Nic()
    assert transfer(PLAIN, Nic(), target, 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.010)
    assert transfer(PLAIN, Nic(), target, 10 * MB, (0.0, 0.002), 10, True) == pytest.approx(0.020)


def test_each_way_is_a_line_of_its_own() -> None:
    one, other = Nic(), Nic()
    assert transfer(PLAIN, one, other, 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.010)
    assert transfer(PLAIN, other, one, 10 * MB, (0.0, 0.0), 10, True) == pytest.approx(0.010)
    assert (one.nbytes_out, one.nbytes_in) == (10 * MB, 10 * MB)


def test_nothing_to_send_takes_no_time_beyond_compute() -> None:
    assert transfer(LAYERWISE, Nic(), Nic(), 0, (1.0, 1.5), 10, True) == 1.5
