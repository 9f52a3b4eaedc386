"""Verdicts on checked writes, and the writer's bounds check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import Epoch, LeaseId
from pd_serve.transport.base import WriteWindow
from pd_serve.transport.windows import Verdict, WindowTable, check_bounds
from tests.transport_nodes import ops, peer_id

WRITER = peer_id("writer")


def table(*ranges: tuple[int, int]) -> WindowTable:
    made = WindowTable()
    starts = np.array([start for start, _ in ranges], np.int64)
    ends = np.array([end for _, end in ranges], np.int64)
    made.open(WriteWindow(LeaseId(1), Epoch(2), WRITER, starts, ends))
    return made


def verdict(windows: WindowTable, *pieces: tuple[int, int]) -> Verdict:
    offsets, lengths = (np.array([piece[index] for piece in pieces], np.int64) for index in (0, 1))
    return windows.check(WRITER, LeaseId(1), Epoch(2), offsets, lengths)


def test_one_write_may_span_ranges_that_touch_but_not_a_gap() -> None:
    windows = table((0, 10), (10, 20), (30, 40))
    assert verdict(windows, (5, 15)) is Verdict.ALLOWED
    assert verdict(windows, (15, 20)) is Verdict.VIOLATION


def test_one_bad_piece_refuses_the_message() -> None:
    assert verdict(table((0, 10)), (0, 4), (9, 2), (4, 4)) is Verdict.VIOLATION


def test_stale_is_told_from_violation() -> None:
    windows = table((0, 10))
    nothing = np.zeros(1, np.int64)
    assert windows.check(WRITER, LeaseId(9), Epoch(2), nothing, nothing) is Verdict.STALE
    assert windows.check(WRITER, LeaseId(1), Epoch(9), nothing, nothing) is Verdict.STALE
    assert windows.check(peer_id("other"), LeaseId(1), Epoch(2), nothing, nothing) is Verdict.VIOLATION
    windows.close(LeaseId(1))
    assert windows.check(WRITER, LeaseId(1), Epoch(2), nothing, nothing) is Verdict.STALE


def test_a_window_without_ranges_allows_nothing() -> None:
    assert verdict(table(), (0, 1)) is Verdict.VIOLATION


ANY = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 60)


@given(st.lists(st.tuples(ANY, ANY), min_size=1, max_size=4))
def test_allowed_means_every_byte_is_inside(pieces: list[tuple[int, int]]) -> None:
    allowed = set(range(10)) | set(range(10, 20)) | set(range(30, 40))
    is_inside = all(0 <= length <= 40 and all(byte in allowed for byte in range(start, start + length)) for start, length in pieces)
    if verdict(table((0, 10), (10, 20), (30, 40)), *pieces) is Verdict.ALLOWED:
        assert is_inside
    elif is_inside:
        assert any(length == 0 for _, length in pieces)


@given(st.lists(st.tuples(ANY, ANY, ANY), max_size=4))
def test_bounds_hold_for_every_number(rows: list[tuple[int, int, int]]) -> None:
    is_inside = all(
        local >= 0 and remote >= 0 and nbytes >= 0 and local + nbytes <= 50 and remote + nbytes <= 40 for local, remote, nbytes in rows
    )
    if is_inside:
        assert check_bounds(ops(*rows), 50, 40) == sum(nbytes for _, _, nbytes in rows)
    else:
        with pytest.raises(OutOfBoundsError):
            check_bounds(ops(*rows), 50, 40)


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.int64), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)])
def test_ops_of_another_shape_or_type_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(OutOfBoundsError):
        check_bounds(bad, 50, 40)
