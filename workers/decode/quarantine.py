"""Getting abandoned leases back: asks their writers to let go, again and again, and fences those that stay silent. Pure.

Owned by the decode machine. A lease gets here when its request has let go while its writer may still write. It ends, and its blocks go
back, once its window is closed and, where that is no fence, Quiesced or Completed has come from every contributor or the writer is dead.
"""

from __future__ import annotations

from pd_serve.errors import StaleError
from pd_serve.ids import LeaseId, PeerId
from pd_serve.kv.lease import HeldLease, LeaseState, LeaseTable
from pd_serve.protocol.link import Sample
from pd_serve.protocol.notify import Abandon, Completed, Quiesced
from workers.events import Action, CloseWindow, HardFence, Observe, SendNotice
from workers.settings import MachineSettings


class Quarantine:
    def __init__(self, settings: MachineSettings, leases: LeaseTable) -> None:
        self._settings = settings
        self._leases = leases
        self._ask_again_at: dict[LeaseId, float] = {}
        """Of every abandoned lease whose writer can still be reached."""
        self._let_go: dict[LeaseId, set[int]] = {}
        """Contributors of a lease that will write no more."""
        self._silent: set[LeaseId] = set()
        """Abandoned leases whose writer has let go before their window was closed."""
        self._fence_again_at: dict[PeerId, float] = {}

    def contributor_done(self, lease: HeldLease, contributor: int) -> bool:
        """One contributor writes no more. True if it was the last of those expected."""
        done = self._let_go.setdefault(lease.lease_id, set())
        done.add(contributor)
        return len(done) == self._settings.num_contributors

    def has_reported(self, lease: HeldLease, contributor: int) -> bool:
        return contributor in self._let_go.get(lease.lease_id, ())

    def forget(self, lease_id: LeaseId) -> None:
        """The lease was filled."""
        self._let_go.pop(lease_id, None)

    def abandon(self, lease_id: LeaseId, now: float) -> list[Action]:
        """The request lets go of its lease. Precondition: GRANTED."""
        lease = self._leases.get(lease_id)
        assert lease is not None
        self._leases.abandon(lease_id, now)
        actions: list[Action] = [CloseWindow(lease_id)]
        if len(self._let_go.get(lease_id, ())) == self._settings.num_contributors:
            self._release(lease_id)
            return actions
        self._ask_again_at[lease_id] = now + self._settings.quarantine_retry_s
        return [*actions, SendNotice(lease.writer, Abandon(lease_id, lease.epoch))]

    def on_window_closed(self, lease_id: LeaseId, fenced: bool) -> None:
        self._leases.quarantine(lease_id)
        if fenced or lease_id in self._silent:
            self._release(lease_id)

    def on_notice(self, peer: PeerId, notice: Completed | Quiesced) -> bool:
        """A record of an abandoned lease: the contributor has let go. False: the record is stale."""
        try:
            lease = self._leases.check(notice.lease_id, notice.epoch, peer)
        except StaleError:
            return False
        assert lease.state is not LeaseState.GRANTED
        if self.has_reported(lease, notice.contributor) or not 0 <= notice.contributor < self._settings.num_contributors:
            return False
        if self.contributor_done(lease, notice.contributor):
            self._release(lease.lease_id)
        return True

    def on_peer_lost(self, peer: PeerId, fenced: bool) -> None:
        """Precondition: the writer's granted leases have been abandoned."""
        for lease in self._leases.of_writer(peer):
            self._ask_again_at.pop(lease.lease_id, None)
            if fenced:
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
            actions.append(SendNotice(lease.writer, Abandon(lease_id, lease.epoch)))
        return actions + self._fence_silent(now)

    def next_deadline(self) -> float | None:
        times = list(self._ask_again_at.values())
        for lease in self._abandoned():
            times.append(max(lease.abandoned_at + self._settings.hard_fence_after_s, self._fence_again_at.get(lease.writer, 0.0)))
        return min(times, default=None)

    # ---- inside

    def _abandoned(self) -> list[HeldLease]:
        """Leases whose writer has not let go."""
        return [lease for lease in self._leases if lease.state is not LeaseState.GRANTED and lease.lease_id not in self._silent]

    def _fence_silent(self, now: float) -> list[Action]:
        """Writers that have been asked for too long, or that hold too much of the pool after being asked twice."""
        settings = self._settings
        share = self._leases.num_quarantined_blocks / settings.layout.num_blocks
        patience = settings.quarantine_retry_s if share > settings.quarantine_fence_share else settings.hard_fence_after_s
        silent = {lease.writer for lease in self._abandoned() if now >= lease.abandoned_at + min(patience, settings.hard_fence_after_s)}
        actions: list[Action] = []
        for peer in sorted(silent):
            if now < self._fence_again_at.get(peer, 0.0):
                continue
            self._fence_again_at[peer] = now + settings.hard_fence_after_s
            actions += [HardFence(peer), Observe(Sample("pd_serve_hard_fences_total", 1.0))]
        return actions

    def _release(self, lease_id: LeaseId) -> None:
        """The writer can write no more. While the window is open a late copy of a write might still be let in: the blocks wait for it."""
        self._ask_again_at.pop(lease_id, None)
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.ABANDONED:
            self._silent.add(lease_id)
        elif self._leases.writer_let_go(lease_id):
            self._silent.discard(lease_id)
            self._let_go.pop(lease_id, None)
