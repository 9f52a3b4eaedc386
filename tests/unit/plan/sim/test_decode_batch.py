"""Steps in closed form are the steps one by one, for every number of joins and ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.plan.sim.decode_batch import DecodeBatch

LATE_S = 0.011


@dataclass(eq=False)
class Sequence:
    order: int
    num_left: int
    num_tokens: int
    joins_at: float = 0.0
    joined_at_step: int = -1
    num_late_before: int = 0
    last_token_at: float = 0.0
    num_late_gaps: int = 0


def batch_of(coefficients: tuple[float, float, float], gaps: list[tuple[float, int]], gap_s: float = 0.0) -> DecodeBatch:
    return DecodeBatch(coefficients, gap_s, LATE_S, lambda seconds, count: gaps.append((seconds, count)))


def in_closed_form(batch: DecodeBatch, sequences: list[Sequence]) -> dict[int, float]:
    """When each ended."""
    ended: dict[int, float] = {}
    coming = sorted(sequences, key=lambda sequence: sequence.joins_at)
    now = 0.0
    while coming or len(batch):
        if not len(batch):
            now = max(now, coming[0].joins_at)
        while coming and coming[0].joins_at <= now:
            sequence = coming.pop(0)
            sequence.last_token_at = sequence.joins_at
            batch.join(sequence, sequence.num_tokens)
        batch.started_at = now
        num_steps = batch.steps_to_end()
        if coming and coming[0].joins_at < now + batch.span_s(num_steps):
            num_steps = min(num_steps, batch.boundary(coming[0].joins_at))
        now += batch.span_s(num_steps)
        batch.advance(num_steps)
        for sequence in batch.pop_ended():
            assert isinstance(sequence, Sequence)
            ended[sequence.order] = now
            batch.leave(sequence, sequence.num_tokens + batch.num_steps - sequence.joined_at_step)
    assert batch.context == 0
    return ended


def one_by_one(coefficients: tuple[float, float, float], sequences: list[Sequence]) -> tuple[dict[int, float], list[float], dict[int, int]]:
    """When each ended, all gaps, and how many were late of each."""
    a, b, c = coefficients
    ended: dict[int, float] = {}
    gaps: list[float] = []
    late: dict[int, int] = {}
    coming = sorted(sequences, key=lambda sequence: sequence.joins_at)
    running: list[list[float]] = []  # order, left, tokens, last token at
    now = 0.0
    while coming or running:
        if not running:
            now = max(now, coming[0].joins_at)
        while coming and coming[0].joins_at <= now:
            sequence = coming.pop(0)
            running.append([sequence.order, sequence.num_left, sequence.num_tokens, sequence.joins_at])
        now += a + b * sum(entry[2] for entry in running) + c * len(running)
        for entry in running:
            gaps.append(now - entry[3])
            late[int(entry[0])] = late.get(int(entry[0]), 0) + (now - entry[3] > LATE_S)
            entry[1], entry[2], entry[3] = entry[1] - 1, entry[2] + 1, now
            if not entry[1]:
                ended[int(entry[0])] = now
        running = [entry for entry in running if entry[1]]
    return ended, gaps, late


SEQUENCES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.sampled_from([(0.006, 2e-8, 4e-5), (0.001, 3e-7, 1e-3), (0.01, 0.0, 0.0), (0.0, 1e-6, 0.0)]))
def test_closed_form_is_step_by_step(drawn: list[tuple[int, int, float]], coefficients: tuple[float, float, float]) -> None:
    sequences = [Sequence(order, left, tokens, at) for order, (left, tokens, at) in enumerate(drawn)]
    gaps: list[tuple[float, int]] = []
    ended = in_closed_form(batch_of(coefficients, gaps), sequences)
    expected, expected_gaps, late = one_by_one(coefficients, sequences)
    assert ended == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert sum(count for _, count in gaps) == len(expected_gaps)
    assert sum(seconds * count for seconds, count in gaps) == pytest.approx(sum(expected_gaps), rel=1e-6)
    near = sum(abs(gap - LATE_S) < 1e-9 for gap in expected_gaps)
    assert abs(sum(late.values()) - sum(sequence.num_late_gaps for sequence in sequences)) <= near


def test_gaps_between_steps_count_for_every_step() -> None:
    gaps: list[tuple[float, int]] = []
    batch = batch_of((0.01, 0.0, 0.0), gaps, gap_s=0.002)
    batch.join(Sequence(0, 5, 100), 100)
    assert batch.span_s(5) == pytest.approx(0.06)


def test_long_runs_are_told_in_pieces_that_are_alike() -> None:
    gaps: list[tuple[float, int]] = []
    batch = batch_of((0.001, 1e-6, 0.0), gaps)
    batch.join(Sequence(0, 2000, 10), 10)
    batch.advance(2000)
    assert len(gaps) < 450
    assert sum(count for _, count in gaps) == 2000
    assert min(gaps)[0] == pytest.approx(0.00101, rel=0.01)
    assert max(gaps)[0] == pytest.approx(0.001 + 2009e-6, rel=0.01)


def test_boundary_is_the_end_of_the_step_that_runs() -> None:
    batch = batch_of((0.01, 0.0, 0.0), [])
    batch.join(Sequence(0, 100, 10), 10)
    batch.started_at = 5.0
    assert batch.boundary(5.0) == 1
    assert batch.boundary(5.0299) == 3
    assert batch.boundary(5.0301) == 4
    assert batch.num_done(5.0299) == 2
