"""Leases that several contributors fill: blocks wait for each of them, whatever became of the others (F7)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.errors import StaleError
from pd_serve.ids import AttemptId, Epoch, Incarnation, PeerId, WorkerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable

P0, P1 = (PeerId(WorkerId(name), Incarnation(1)) for name in ("p0", "p1"))
PARTS = {0: P0, 1: P0, 2: P1}
"""Two ranks in one process and one in another."""


def make() -> tuple[BlockPool, LeaseTable, HeldLease]:
    pool = BlockPool(2, 4)
    table = LeaseTable(pool, lambda: Epoch(7))
    return pool, table, table.grant(AttemptId(1), P0, pool.allocate(2), 0, 10.0, PARTS)


def test_a_lease_is_complete_with_the_last_of_its_contributors() -> None:
    _, table, lease = make()
    assert [table.complete(lease.lease_id, number) for number in (2, 0, 0)] == [False] * 3, "the same twice is not two of them"
    assert lease.writers == (P0,)
    assert table.complete(lease.lease_id, 1)
    assert table.fill(lease.lease_id) == lease.blocks


def test_records_of_every_contributor_are_its_leases_own_and_of_no_other() -> None:
    _, table, lease = make()
    for peer in (P0, P1):
        assert table.check(lease.lease_id, lease.epoch, peer) is lease
    with pytest.raises(StaleError):
        table.check(lease.lease_id, lease.epoch, PeerId(P1.worker_id, Incarnation(2)))


def test_failure_of_the_first_contributor_frees_nothing_while_another_may_write() -> None:
    pool, table, lease = make()
    assert not table.let_go(lease.lease_id, 0)
    table.abandon(lease.lease_id, 1.0)
    assert not table.quarantine(lease.lease_id)
    assert (lease.state, pool.num_allocatable) == (LeaseState.QUARANTINED, 0)
    assert not table.let_go(lease.lease_id, 2)
    assert not table.let_go(lease.lease_id, 2)
    assert pool.num_allocatable == 0
    assert table.let_go(lease.lease_id, 1)
    assert pool.num_allocatable == 2


def test_the_end_of_one_process_lets_its_own_contributors_go_only() -> None:
    pool, table, lease = make()
    table.abandon(lease.lease_id, 1.0)
    table.quarantine(lease.lease_id)
    assert not table.process_let_go(lease.lease_id, P0)
    assert (table.of_writer(P0), table.of_writer(P1)) == ((), (lease,))
    assert pool.num_allocatable == 0
    assert table.process_let_go(lease.lease_id, P1)
    assert pool.num_allocatable == 2


def test_a_process_that_completed_and_died_does_not_concern_the_lease() -> None:
    _, table, lease = make()
    table.complete(lease.lease_id, 2)
    assert table.of_writer(P1) == ()
    assert not table.process_let_go(lease.lease_id, P1)
    assert lease.missing == {0, 1}


PEERS = (P0, P1)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["complete", "let_go"]), st.integers(0, 4)),
    st.tuples(st.just("process"), st.integers(0, 1)),
    st.tuples(st.sampled_from(["abandon", "close window", "fill"]), st.just(0)),
)


class Run:
    """One lease, driven through any order of endings beside a model of who holds its blocks."""

    def __init__(self, parts: dict[int, PeerId]) -> None:
        self.pool = BlockPool(3, 4)
        self.table = LeaseTable(self.pool, lambda: Epoch(7))
        self.lease = self.table.grant(AttemptId(1), P0, self.pool.allocate(3), 0, 10.0, parts)
        self.parts = parts
        self.holders: set[object] = {"request", "window", *parts}
        self.completed: set[int] = set()
        self.released = 0
        self.filled: tuple[int, ...] = ()

    def do(self, kind: str, number: int) -> None:
        table, lease_id = self.table, self.lease.lease_id
        is_live = table.get(lease_id) is not None
        was_free = self.pool.num_allocatable
        if kind == "complete" and is_live and number in self.parts:
            self.completed.add(number)
            self.holders.discard(number)
            assert table.complete(lease_id, number) is (self.completed == set(self.parts))
        elif kind == "let_go":
            self.holders.discard(number)
            table.let_go(lease_id, number)
        elif kind == "process":
            self.holders -= {part for part, peer in self.parts.items() if peer == PEERS[number]}
            table.process_let_go(lease_id, PEERS[number])
        elif kind == "abandon" and not self.filled:
            self.holders.discard("request")
            table.abandon(lease_id, 1.0)
        elif kind == "close window" and "request" not in self.holders:
            self.holders.discard("window")
            table.quarantine(lease_id)
        elif kind == "fill" and is_live and self.lease.state is LeaseState.GRANTED and not self.lease.missing:
            self.filled = table.fill(lease_id)
        self.released += self.pool.num_allocatable - was_free

    def check(self) -> None:
        self.pool.check()
        if self.filled:
            assert self.completed == set(self.parts)
            assert self.released == 0
        else:
            assert self.released == (0 if self.holders else 3), "blocks come back with the last holder, neither before nor after"


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PEERS), min_size=1, max_size=4), steps=st.lists(STEPS, max_size=30))
def test_any_order_of_endings_returns_every_block_once_and_with_the_last_holder(parts: list[PeerId], steps: list[tuple[str, int]]) -> None:
    run = Run(dict(enumerate(parts)))
    for kind, number in steps:
        run.do(kind, number)
        run.check()
    for kind, number in (("abandon", 0), ("close window", 0), ("process", 0), ("process", 1)):
        run.do(kind, number)
        run.check()
    run.pool.release(run.filled)
    assert run.pool.num_allocatable == 3
    assert len(run.table) == 0


def test_planted_release_with_the_first_failure_is_seen() -> None:
    """The historic mistake: one sibling's failure ends the lease for all of them."""

    class FirstFailureFrees(LeaseTable):
        def let_go(self, lease_id, contributor) -> bool:  # type: ignore[no-untyped-def]
            lease = self.get(lease_id)
            if lease is not None:
                lease.writing.clear()
            return super().let_go(lease_id, contributor)

    run = Run({0: P0, 1: P1})
    run.table.__class__ = FirstFailureFrees
    run.do("abandon", 0)
    run.do("close window", 0)
    run.do("let_go", 0)
    with pytest.raises(AssertionError, match="with the last holder"):
        run.check()


def test_counts_are_of_leases_not_of_contributors() -> None:
    _, table, lease = make()
    table.abandon(lease.lease_id, 1.0)
    assert Counter(dict(table.counts())) == Counter(abandoned=1)
    assert table.num_quarantined_blocks == 2
