"""F7 with real processes: two writers of one lease, of which the first fails while the other writes on."""

from __future__ import annotations

import time

from pd_serve.ids import AttemptId, Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.kv.lease import LeaseTable
from tests.contract.ucx.processes import POOL_NBYTES, Cluster, Process

CHUNK = 64 * 1024
WINDOWS = (1, 2)
"""Of the first and the second writer, both over the whole pool."""


class FirstFailureFrees(LeaseTable):
    """The historic mistake: one sibling's failure ends the lease for all of them."""

    def process_let_go(self, lease_id: LeaseId, writer: PeerId) -> bool:
        return self.writer_let_go(lease_id)


def id_of(process: Process) -> PeerId:
    name, incarnation = process.peer
    return PeerId(WorkerId(name), Incarnation(incarnation))


def is_left_alone(target: Process, seconds: float = 0.3) -> bool:
    """What a new owner of all blocks puts there stays, for that long."""
    target.call("fill", value=0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        target.call("run", seconds=0.1)
        if target.call("count", value=0) != POOL_NBYTES:
            return False
    return True


def first_dies_second_writes_on(cluster: Cluster, kind: type[LeaseTable]) -> tuple[bool, bool]:
    """Whether the blocks came back before the second writer had stopped, and whether they were left alone once they were back."""
    first, second, target = (cluster.start(name) for name in ("first", "second", "target"))
    pool = BlockPool(4, 16)
    table = kind(pool, lambda: Epoch(1))
    writers = (first, second)
    lease_id = table.grant(AttemptId(1), id_of(first), pool.allocate(4), 0, 60.0, dict(enumerate(map(id_of, writers)))).lease_id
    for writer, window in zip(writers, WINDOWS, strict=True):
        cluster.join(writer, target)
        target.allow(writer, lease=window)
        writer.call("fill", value=window)
        writer.call("stream", peer=target.peer, nbytes=CHUNK, lease=window)
    for writer in writers:
        writer.wait_streaming(target)

    first.kill()
    assert target.wait("PeerLost")["fenced"]
    table.abandon(lease_id, 1.0)
    fenced = [target.call("close_window", lease=window) for window in WINDOWS]
    assert fenced == [True, not cluster.one_sided]
    table.process_let_go(lease_id, id_of(first))
    table.quarantine(lease_id)
    if fenced[1]:
        table.process_let_go(lease_id, id_of(second))
    came_back_early = pool.num_allocatable == 4
    if came_back_early:
        return True, is_left_alone(target, 5.0 if cluster.one_sided else 0.3)

    assert not is_left_alone(target, 5.0), "the second writer must still be writing for this to say anything"
    second.call("stop_stream")
    second.call("flush", peer=target.peer, token=9)
    assert second.wait("Flushed")["token"] == 9
    table.process_let_go(lease_id, id_of(second))
    assert pool.num_allocatable == 4
    return False, is_left_alone(target)


def test_blocks_of_a_failed_writer_wait_for_its_sibling(cluster: Cluster) -> None:
    """Where closing the second's window stops it, they need not wait."""
    assert first_dies_second_writes_on(cluster, LeaseTable) == (not cluster.one_sided, True)


def test_the_check_catches_blocks_that_come_back_with_the_first_failure(shm_cluster: Cluster) -> None:
    """PLANTED: the sibling writes into what has a new owner."""
    assert first_dies_second_writes_on(shm_cluster, FirstFailureFrees) == (True, False)
