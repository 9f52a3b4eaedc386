"""Blocks that other processes may write into. Pure, single-threaded: owned by the decode machine, on the control thread.

A leased block has several holders and goes back to the pool only when all of them have let go: the request that owns it, the write window,
and every contributor, one of the prefill ranks that each write a part of the KV (with one rank: one contributor, 0):

    GRANTED --fill--> FILLED (every contributor has completed; the request keeps the blocks, the lease is over)
    GRANTED --abandon--> ABANDONED --quarantine--> QUARANTINED --the last contributor lets go--> RELEASED
                                        `--quarantine, no contributor writes any more-------------^

The request lets go by finishing, cancel or deadline; the window by being closed. A contributor lets go by its completion, its Quiesced, or
by being fenced. A deadline alone never frees a block, nor does the failure of one contributor while another may still write. Records are
accepted only for (lease, epoch, writer) as granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
    """The window is closed, which does not stop these writers: waiting until each has let go or is fenced."""
    RELEASED = "released"


@dataclass(slots=True)
class HeldLease:
    """One grant. Changed by its LeaseTable only."""

    lease_id: LeaseId
    epoch: Epoch
    attempt_id: AttemptId
    writer: PeerId
    """The worker that the request named; its process is the only contributor unless others were granted too."""
    blocks: tuple[int, ...]
    """From logical block 0, cached ones included."""
    num_cached_blocks: int
    """Leading blocks that are shared with the prefix cache and never written under the lease."""
    deadline: float
    """Monotonic; the KV must have arrived by then."""
    contributors: Mapping[int, PeerId]
    """{number of each contributor expected: the process that writes its part}. Several may be parts of one process."""
    state: LeaseState = LeaseState.GRANTED
    abandoned_at: float = 0.0
    writing: set[int] = field(init=False)
    """Contributors that have not let go: their writes may still land."""
    missing: set[int] = field(init=False)
    """Contributors whose part of the KV has not arrived."""

    def __post_init__(self) -> None:
        self.writing, self.missing = set(self.contributors), set(self.contributors)

    @property
    def writers(self) -> tuple[PeerId, ...]:
        """Processes of which a write may still land, each once, sorted."""
        return tuple(sorted({self.contributors[number] for number in self.writing}))

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

    def grant(
        self,
        attempt_id: AttemptId,
        writer: PeerId,
        blocks: tuple[int, ...],
        num_cached_blocks: int,
        deadline: float,
        contributors: Mapping[int, PeerId] | None = None,
    ) -> HeldLease:
        """Precondition: the caller holds one reference to each block, which is now the table's.

        `contributors` as in HeldLease, at least one; None: the writer alone, as number 0.
        """
        parts = {0: writer} if contributors is None else dict(contributors)
        assert parts, "a lease that nobody fills"
        lease = HeldLease(LeaseId(self._next_id), self._new_epoch(), attempt_id, writer, blocks, num_cached_blocks, deadline, parts)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        return lease

    def check(self, lease_id: LeaseId, epoch: Epoch, writer: PeerId) -> HeldLease:
        """The live lease that a record speaks of. Raises StaleError when there is none, or it is another's."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StaleError(f"lease {lease_id} is not live")
        if lease.epoch != epoch or writer not in lease.contributors.values():
            raise StaleError(f"lease {lease_id} was granted to {lease.writer} under another epoch or writer than {writer}")
        return lease

    def complete(self, lease_id: LeaseId, contributor: int) -> bool:
        """A contributor's part of the KV is here, and it lets go. True when it was the last part: a GRANTED lease may be filled.

        Of an abandoned lease it is `let_go`. Precondition: live, and the contributor is one of those expected.
        """
        lease = self._leases[lease_id]
        lease.missing.discard(contributor)
        self.let_go(lease_id, contributor)
        return not lease.missing

    def fill(self, lease_id: LeaseId) -> tuple[int, ...]:
        """All KV has arrived: the blocks and their references are the caller's. Precondition: GRANTED, every contributor has completed."""
        lease = self._leases[lease_id]
        assert lease.state is LeaseState.GRANTED, lease.state
        lease.state = LeaseState.FILLED
        del self._leases[lease_id]
        return lease.blocks

    def abandon(self, lease_id: LeaseId, now: float) -> None:
        """The request lets go. Shared prefix blocks go back at once (nobody writes them), the others wait for the writers. Idempotent."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.GRANTED:
            return
        lease.state = LeaseState.ABANDONED
        lease.abandoned_at = now
        self._pool.release(lease.blocks[: lease.num_cached_blocks])

    def quarantine(self, lease_id: LeaseId) -> bool:
        """The window of an abandoned lease is closed, which alone does not stop its writers. Idempotent.

        True when that freed the blocks: all contributors had let go before.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.ABANDONED:
            return False
        lease.state = LeaseState.QUARANTINED
        return self._release_if_quiet(lease)

    def let_go(self, lease_id: LeaseId, contributor: int) -> bool:
        """No write of this contributor can land any more, whatever became of its part. Idempotent.

        True when that freed the blocks: the lease is quarantined, and it was the last that could write.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.writing.discard(contributor)
        return self._release_if_quiet(lease)

    def process_let_go(self, lease_id: LeaseId, writer: PeerId) -> bool:
        """`let_go` of every contributor of one process, as when it has died."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.writing -= {number for number, peer in lease.contributors.items() if peer == writer}
        return self._release_if_quiet(lease)

    def writer_let_go(self, lease_id: LeaseId) -> bool:
        """No write of anybody can land any more. Frees the blocks of a quarantined lease; True when it did.

        Those of an ABANDONED lease follow when its window is closed. A GRANTED lease is left alone: its request has not let go.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is LeaseState.GRANTED:
            return False
        lease.writing.clear()
        return self._release_if_quiet(lease)

    def _release_if_quiet(self, lease: HeldLease) -> bool:
        if lease.state is not LeaseState.QUARANTINED or lease.writing:
            return False
        lease.state = LeaseState.RELEASED
        del self._leases[lease.lease_id]
        self._pool.release(lease.writable_blocks)
        return True

    def of_writer(self, writer: PeerId) -> tuple[HeldLease, ...]:
        """Leases under which a write of that process may still land."""
        return tuple(lease for lease in self._leases.values() if writer in lease.writers)

    def expired(self, now: float) -> tuple[HeldLease, ...]:
        """Granted leases whose KV has not arrived in time."""
        return tuple(lease for lease in self._leases.values() if lease.state is LeaseState.GRANTED and lease.deadline <= now)

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._leases.values() if lease.state is LeaseState.GRANTED), default=None)

    def granted_blocks(self) -> set[int]:
        """Blocks that come back only after a writer has computed their KV, cached ones included."""
        return {block for lease in self._leases.values() if lease.state is LeaseState.GRANTED for block in lease.blocks}

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that remote writers may legitimately write into."""
        return sum(len(lease.writable_blocks) for lease in self._leases.values() if lease.state is LeaseState.GRANTED)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks whose request has gone while their window is open or a contributor may still write."""
        return sum(len(lease.writable_blocks) for lease in self._leases.values() if lease.state is not LeaseState.GRANTED)

    def counts(self) -> tuple[tuple[str, int], ...]:
        """(state, number of leases) for every state a live lease can be in."""
        states = (LeaseState.GRANTED, LeaseState.ABANDONED, LeaseState.QUARANTINED)
        return tuple((state.value, sum(1 for lease in self._leases.values() if lease.state is state)) for state in states)
