"""Blocks that another process may write into. Pure, single-threaded: owned by the decode machine, on the control thread.

A leased block has two holders, the request that owns it and the remote writer, and goes back to the pool only when both have let go:

    GRANTED --fill--> FILLED (the request keeps the blocks, the lease is over)
    GRANTED --abandon--> ABANDONED --quarantine--> QUARANTINED --writer_let_go--> RELEASED
                             `------------writer_let_go-----------------------------^

The request lets go by finishing, cancel or deadline. The writer lets go by its completion, its Quiesced, or by being fenced. A deadline
alone never frees a block. Records are accepted only for (lease, epoch, writer) as granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from pd_serve.errors import StaleError
from pd_serve.ids import AttemptId, Epoch, LeaseId, PeerId
from pd_serve.kv.block_pool import BlockPool


class LeaseState(Enum):
    GRANTED = "granted"
    FILLED = "filled"
    ABANDONED = "abandoned"
    """The request has let go; the write window is being closed."""
    QUARANTINED = "quarantined"
    """The window is closed, which does not stop this writer: waiting until it lets go or is fenced."""
    RELEASED = "released"


@dataclass(slots=True)
class HeldLease:
    """One grant. Changed by its LeaseTable only."""

    lease_id: LeaseId
    epoch: Epoch
    attempt_id: AttemptId
    writer: PeerId
    blocks: tuple[int, ...]
    """From logical block 0, cached ones included."""
    num_cached_blocks: int
    """Leading blocks that are shared with the prefix cache and never written under the lease."""
    deadline: float
    """Monotonic; the KV must have arrived by then."""
    state: LeaseState = LeaseState.GRANTED
    abandoned_at: float = 0.0

    @property
    def writable_blocks(self) -> tuple[int, ...]:
        return self.blocks[self.num_cached_blocks :]


class LeaseTable:
    """All leases not yet over. The references to a live lease's blocks are the table's; fill() hands them to the request."""

    def __init__(self, pool: BlockPool, new_epoch: Callable[[], Epoch]) -> None:
        self._pool = pool
        self._new_epoch = new_epoch
        self._leases: dict[LeaseId, HeldLease] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[HeldLease]:
        """Oldest first, over a copy: leases may end during the iteration."""
        return iter(tuple(self._leases.values()))

    def get(self, lease_id: LeaseId) -> HeldLease | None:
        return self._leases.get(lease_id)

    def grant(self, attempt_id: AttemptId, writer: PeerId, blocks: tuple[int, ...], num_cached_blocks: int, deadline: float) -> HeldLease:
        """Precondition: the caller holds one reference to each block, which is now the table's."""
        lease = HeldLease(LeaseId(self._next_id), self._new_epoch(), attempt_id, writer, blocks, num_cached_blocks, deadline)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        return lease

    def check(self, lease_id: LeaseId, epoch: Epoch, writer: PeerId) -> HeldLease:
        """The live lease that a record speaks of. Raises StaleError when there is none, or it is another's."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleError(f"lease {lease_id} is not live")
        if lease.epoch != epoch or lease.writer != writer:
            raise StaleError(f"lease {lease_id} was granted to {lease.writer} under another epoch or writer than {writer}")
        return lease

    def fill(self, lease_id: LeaseId) -> tuple[int, ...]:
        """All KV has arrived: the writer lets go, the blocks and their references are the caller's. Precondition: GRANTED."""
        lease = self._leases[lease_id]
        assert lease.state is LeaseState.GRANTED, lease.state
        lease.state = LeaseState.FILLED
        del self._leases[lease_id]
        return lease.blocks

    def abandon(self, lease_id: LeaseId, now: float) -> None:
        """The request lets go. Shared prefix blocks go back at once (nobody writes them), the others wait for the writer. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        lease.state = LeaseState.ABANDONED
        lease.abandoned_at = now
        self._pool.release(lease.blocks[: lease.num_cached_blocks])

    def quarantine(self, lease_id: LeaseId) -> None:
        """The window of an abandoned lease is closed, but that does not stop its writer. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.ABANDONED:
            lease.state = LeaseState.QUARANTINED

    def writer_let_go(self, lease_id: LeaseId) -> bool:
        """No write can land any more. Frees the blocks of an abandoned lease; True when it did.

        A GRANTED lease is left alone: its request has not let go; abandon it first.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is LeaseState.GRANTED:
            return False
        lease.state = LeaseState.RELEASED
        del self._leases[lease_id]
        self._pool.release(lease.writable_blocks)
        return True

    def of_writer(self, writer: PeerId) -> tuple[HeldLease, ...]:
        return tuple(lease for lease in self._leases.values() if lease.writer == writer)

    def expired(self, now: float) -> tuple[HeldLease, ...]:
        """Granted leases whose KV has not arrived in time."""
        return tuple(lease for lease in self._leases.values() if lease.state is LeaseState.GRANTED and lease.deadline <= now)

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._leases.values() if lease.state is LeaseState.GRANTED), default=None)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks a remote writer may legitimately write into."""
        return sum(len(lease.writable_blocks) for lease in self._leases.values() if lease.state is LeaseState.GRANTED)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks whose request has gone and whose writer has not let go."""
        return sum(len(lease.writable_blocks) for lease in self._leases.values() if lease.state is not LeaseState.GRANTED)

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(state, number of leases) for every state a live lease can be in."""
        states = (LeaseState.GRANTED, LeaseState.ABANDONED, LeaseState.QUARANTINED)
        return tuple((state.value, sum(1 for lease in self._leases.values() if lease.state is state)) for state in states)
