"""Getting abandoned leases back: asks their writers to let go, again and again, and fences those that stay silent. Pure.

Owned by the decode machine. A lease gets here when its request has let go while somebody may still write under it. It ends, and its
blocks go back, once its window is closed and, where that is no fence, Quiesced or Completed has come from every contributor or its process
is dead. Who has let go is in the lease itself (kv/lease.py).
"""

from __future__ import annotations

from pd_serve.errors import StaleError
from pd_serve.ids import LeaseId, PeerId
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable
from pd_serve.protocol.link import Sample
from pd_serve.protocol.notify import ALL_CONTRIBUTORS, Abandon, Completed, Quiesced
from workers.events import Action, CloseWindow, HardFence, Observe, SendNotice
from workers.settings import MachineSettings


class Quarantine:
    def __init__(self, settings: MachineSettings, leases: LeaseTable) -> None:
        self._settings = settings
        self._leases = leases
        self._ask_again_at: dict[LeaseId, float] = {}
        """Of every abandoned lease of which a writer can still be reached."""
        self._fence_again_at: dict[PeerId, float] = {}

    def abandon(self, lease_id: LeaseId, now: float) -> list[Action]:
        """The request lets go of its lease. Precondition: GRANTED."""
        lease = self._leases.get(lease_id)
        assert lease is not None
        self._leases.abandon(lease_id, now)
        if lease.writing:
            self._ask_again_at[lease_id] = now + self._settings.quarantine_retry_s
        return [CloseWindow(lease_id), *_ask(lease)]

    def on_window_closed(self, lease_id: LeaseId, fenced: bool) -> None:
        self._leases.quarantine(lease_id)
        if fenced:
            self._release(lease_id)

    def on_notice(self, peer: PeerId, notice: Completed | Quiesced) -> bool:
        """A record of an abandoned lease: the contributor has let go. False: the record is stale."""
        try:
            lease = self._leases.check(notice.lease_id, notice.epoch, peer)
        except StaleError:
            return False
        assert lease.state is not LeaseState.GRANTED
        if not may_report(lease, peer, notice.contributor):
            return False
        self.take_leave(lease, peer, notice)
        if not lease.writing:
            self._release(lease.lease_id)
        return True

    def take_leave(self, lease: HeldLease, peer: PeerId, notice: Completed | Quiesced) -> None:
        """The contributor that a record of a live lease speaks of, or the whole writer, can write no more."""
        if notice.contributor == ALL_CONTRIBUTORS:
            self._leases.process_let_go(lease.lease_id, peer)
        else:
            self._leases.let_go(lease.lease_id, notice.contributor)

    def on_peer_lost(self, peer: PeerId, fenced: bool) -> None:
        """Precondition: granted leases under which the peer may still write have been abandoned."""
        for lease in self._leases.of_writer(peer):
            if lease.writers == (peer,):
                self._ask_again_at.pop(lease.lease_id, None)
            if fenced:
                self._leases.process_let_go(lease.lease_id, peer)
                if not lease.writing:
                    self._release(lease.lease_id)
        if fenced:
            self._fence_again_at.pop(peer, None)

    def on_tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lease_id, due in tuple(self._ask_again_at.items()):
            if due > now:
                continue
            lease = self._leases.get(lease_id)
            assert lease is not None
            self._ask_again_at[lease_id] = now + self._settings.quarantine_retry_s
            actions += _ask(lease)
        return actions + self._fence_silent(now)

    def next_deadline(self) -> float | None:
        times = list(self._ask_again_at.values())
        for lease in self._abandoned():
            again = min(self._fence_again_at.get(peer, 0.0) for peer in lease.writers)
            times.append(max(lease.abandoned_at + self._settings.hard_fence_after_s, again))
        return min(times, default=None)

    # ---- inside

    def _abandoned(self) -> list[HeldLease]:
        """Leases under which somebody may still write."""
        return [lease for lease in self._leases if lease.state is not LeaseState.GRANTED and lease.writing]

    def _fence_silent(self, now: float) -> list[Action]:
        """Writers that have been asked for too long, or that hold too much of the pool after being asked twice."""
        settings = self._settings
        share = self._leases.num_quarantined_blocks / settings.layout.num_blocks
        patience = settings.quarantine_retry_s if share > settings.quarantine_fence_share else settings.hard_fence_after_s
        patience = min(patience, settings.hard_fence_after_s)
        silent = {peer for lease in self._abandoned() if now >= lease.abandoned_at + patience for peer in lease.writers}
        actions: list[Action] = []
        for peer in sorted(silent):
            if now < self._fence_again_at.get(peer, 0.0):
                continue
            self._fence_again_at[peer] = now + settings.hard_fence_after_s
            actions += [HardFence(peer), Observe(Sample("pd_serve_hard_fences_total", 1.0))]
        return actions

    def _release(self, lease_id: LeaseId) -> None:
        """Nobody can write any more. While the window is open a late copy of a write might still be let in: the blocks wait for it."""
        self._ask_again_at.pop(lease_id, None)
        self._leases.writer_let_go(lease_id)


def may_report(lease: HeldLease, peer: PeerId, contributor: int) -> bool:
    """A record by `peer` can be that contributor's: it is one of those expected, of that process, and has not let go."""
    if contributor == ALL_CONTRIBUTORS:
        return peer in lease.writers
    return contributor in lease.writing and lease.contributors[contributor] == peer


def _ask(lease: HeldLease) -> list[Action]:
    """All that may still write are asked to let go."""
    return [SendNotice(peer, Abandon(lease.lease_id, lease.epoch)) for peer in lease.writers]
