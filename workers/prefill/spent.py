"""Leases under which nothing may be pushed any more, or again. Pure; owned by the prefill machine.

Why: an Abandon can overtake the Prefill frame that names its lease (they travel on different connections). Once its Quiesced is on the way,
the late Prefill must be refused, however late. Ids of one holder grow, so memory stays bounded by refusing everything below a floor.
"""

from __future__ import annotations

from pd_serve.ids import LeaseId, PeerId


class SpentLeases:
    def __init__(self, keep_per_holder: int = 4096) -> None:
        self._keep = keep_per_holder
        self._spent: dict[PeerId, set[LeaseId]] = {}
        self._floor: dict[PeerId, LeaseId] = {}
        """Leases of the holder up to this id count as spent."""

    def add(self, holder: PeerId, lease_id: LeaseId) -> None:
        spent = self._spent.setdefault(holder, set())
        spent.add(lease_id)
        if len(spent) > self._keep:
            oldest = sorted(spent)[: self._keep // 2]
            spent.difference_update(oldest)
            self._floor[holder] = max(self._floor.get(holder, LeaseId(0)), oldest[-1])

    def contains(self, holder: PeerId, lease_id: LeaseId) -> bool:
        return lease_id in self._spent.get(holder, ()) or lease_id <= self._floor.get(holder, LeaseId(0))

    def forget(self, holder: PeerId) -> None:
        """The holder is gone for good: no router can name its leases any more."""
        self._spent.pop(holder, None)
        self._floor.pop(holder, None)
