from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.errors import StaleError
from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable

P0 = PeerId(WorkerId("p0"), Incarnation(1))
P1 = PeerId(WorkerId("p1"), Incarnation(1))


def make(num_blocks: int = 8) -> tuple[BlockPool, LeaseTable]:
    rng = random.Random(0)
    pool = BlockPool(num_blocks, 4)
    return pool, LeaseTable(pool, lambda: Epoch(rng.getrandbits(63)))


def grant(pool: BlockPool, table: LeaseTable, count: int = 2, writer: PeerId = P0, deadline: float = 10.0) -> HeldLease:
    return table.grant(AttemptId(1), writer, pool.allocate(count), 0, deadline)


def test_filled_lease_hands_its_blocks_to_the_request() -> None:
    pool, table = make()
    lease = grant(pool, table)
    assert table.fill(lease.lease_id) == lease.blocks
    assert len(table) == 0
    assert pool.counts().held == 2


def test_abandoned_lease_is_not_reused_before_its_writer_lets_go() -> None:
    pool, table = make(2)
    lease = grant(pool, table)
    table.abandon(lease.lease_id, 1.0)
    assert pool.num_allocatable == 0
    table.quarantine(lease.lease_id)
    assert pool.num_allocatable == 0
    assert table.num_quarantined_blocks == 2
    assert table.writer_let_go(lease.lease_id)
    assert pool.num_allocatable == 2
    assert not table.writer_let_go(lease.lease_id)


def test_writer_that_lets_go_first_does_not_free_what_the_request_holds() -> None:
    pool, table = make(2)
    lease = grant(pool, table)
    assert not table.writer_let_go(lease.lease_id)
    assert lease.state is LeaseState.GRANTED
    assert pool.num_allocatable == 0


def test_blocks_of_an_abandoned_lease_wait_for_its_window_too() -> None:
    pool, table = make(2)
    lease = grant(pool, table)
    table.abandon(lease.lease_id, 1.0)
    assert not table.writer_let_go(lease.lease_id)
    assert table.of_writer(P0) == ()
    assert pool.num_allocatable == 0
    assert table.quarantine(lease.lease_id)
    assert not table.quarantine(lease.lease_id)
    assert pool.num_allocatable == 2


def test_deadline_alone_frees_nothing() -> None:
    pool, table = make(2)
    lease = grant(pool, table, deadline=5.0)
    assert table.next_deadline() == 5.0
    assert table.expired(4.9) == ()
    assert table.expired(5.0) == (lease,)
    assert pool.num_allocatable == 0
    table.abandon(lease.lease_id, 5.0)
    assert table.next_deadline() is None
    assert table.expired(100.0) == ()
    assert pool.num_allocatable == 0


def test_a_live_old_lease_does_not_hold_up_an_expired_younger_one() -> None:
    pool, table = make()
    old, young = grant(pool, table, deadline=100.0), grant(pool, table, deadline=5.0)
    assert table.next_deadline() == 5.0
    assert table.expired(5.0) == (young,)
    assert table.expired(100.0) == (old, young)


def test_shared_prefix_of_an_abandoned_lease_returns_at_once() -> None:
    pool, table = make(4)
    ids = list(range(8))
    blocks = pool.allocate(2)
    pool.publish(ids, blocks, 8)
    pool.release(blocks)
    matched = pool.match_prefix([*ids, 9])
    lease = table.grant(AttemptId(1), P0, (*matched, *pool.allocate(1)), 2, 10.0)
    assert table.num_leased_blocks == 1
    table.abandon(lease.lease_id, 1.0)
    table.abandon(lease.lease_id, 1.0)
    assert pool.counts().cached == 2
    assert pool.counts().held == 1
    table.quarantine(lease.lease_id)
    table.writer_let_go(lease.lease_id)
    assert pool.counts().held == 0


def test_record_of_another_epoch_writer_or_lease_is_stale() -> None:
    pool, table = make()
    lease = grant(pool, table)
    assert table.check(lease.lease_id, lease.epoch, P0) is lease
    for lease_id, epoch, writer in (
        (lease.lease_id, Epoch(lease.epoch + 1), P0),
        (lease.lease_id, lease.epoch, P1),
        (LeaseId(lease.lease_id + 1), lease.epoch, P0),
        (lease.lease_id, lease.epoch, PeerId(P0.worker_id, Incarnation(2))),
    ):
        with pytest.raises(StaleError):
            table.check(lease_id, epoch, writer)


def test_second_completion_is_stale() -> None:
    pool, table = make()
    lease = grant(pool, table)
    table.fill(lease.lease_id)
    with pytest.raises(StaleError):
        table.check(lease.lease_id, lease.epoch, P0)


def test_leases_of_a_writer_are_found_by_incarnation() -> None:
    pool, table = make()
    lease = grant(pool, table)
    grant(pool, table, writer=P1)
    assert table.of_writer(P0) == (lease,)
    assert table.of_writer(PeerId(P0.worker_id, Incarnation(2))) == ()


@settings(max_examples=80, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_any_order_of_endings_returns_every_block_once(rng: random.Random) -> None:
    pool, table = make(16)
    owned: list[tuple[int, ...]] = []
    live: list[HeldLease] = []
    for now in range(80):
        kind = rng.choice(["grant", "fill", "abandon", "quarantine", "let_go", "finish"])
        if kind == "grant" and pool.num_allocatable >= 3:
            live.append(grant(pool, table, rng.randint(1, 3)))
        elif kind == "finish" and owned:
            pool.release(owned.pop())
        elif live:
            lease = rng.choice(live)
            if kind == "fill" and lease.state is LeaseState.GRANTED:
                owned.append(table.fill(lease.lease_id))
            elif kind == "abandon":
                table.abandon(lease.lease_id, float(now))
            elif kind == "quarantine":
                table.quarantine(lease.lease_id)
            elif kind == "let_go":
                table.writer_let_go(lease.lease_id)
        live = [lease for lease in live if table.get(lease.lease_id) is lease]
        pool.check()
        in_leases = table.num_leased_blocks + table.num_quarantined_blocks
        assert pool.counts().held == in_leases + sum(map(len, owned))
        assert sum(count for _, count in table.counts()) == len(table)
    for lease in table:
        table.abandon(lease.lease_id, 99.0)
        table.quarantine(lease.lease_id)
        table.writer_let_go(lease.lease_id)
    for blocks in owned:
        pool.release(blocks)
    assert pool.num_allocatable == 16


def test_planted_release_at_the_deadline_is_seen() -> None:
    """The historic mistake: a deadline frees blocks that the writer may still write."""
    pool, table = make(2)
    lease = grant(pool, table)
    pool.release(lease.blocks)
    assert set(pool.allocate(2)) == set(lease.blocks)
    assert table.get(lease.lease_id) is lease
