"""Memory that packed KV waits in until the target has it: a bounded number of equal slots behind the pool.

Used by the transport thread only.

A peer may take a slot only while more are free than it holds. So one that has stopped reading keeps half of them at most, a second one a
quarter, and there is one left for whoever is next; what finds none waits in its peer's queue, where it holds up nobody else.
"""

from __future__ import annotations

from collections import Counter

from pd_serve.errors import ConfigError
from pd_serve.ids import PeerId
from pd_serve.kv.layout import KVDtype, KVLayout


class StagingRing:
    def __init__(self, offset: int, nbytes: int, slot_nbytes: int) -> None:
        """`offset`: of the first slot, in the registered region. Slots that do not fit in whole are not used."""
        self.slot_nbytes = slot_nbytes
        self._free = [offset + index * slot_nbytes for index in reversed(range(nbytes // slot_nbytes))]
        self._held: Counter[PeerId] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, peer: PeerId) -> int | None:
        """Offset of a slot, or None: wait until one is given back."""
        if len(self._free) <= self._held[peer]:
            return None
        self._held[peer] += 1
        return self._free.pop()

    def give_back(self, peer: PeerId, slots: list[int]) -> None:
        self._free += slots
        self._held[peer] -= len(slots)
        assert self._held[peer] >= 0, f"{peer} gives back slots that it does not hold"
        if not self._held[peer]:
            del self._held[peer]


def check_staging(layout: KVLayout, nbytes: int, slot_nbytes: int) -> None:
    """Raises ConfigError where staging cannot hold what this pool's KV may have to be converted to."""
    needed = layout.num_planes * layout.num_kv_heads * layout.head_dim * KVDtype.FLOAT32.nbytes
    if slot_nbytes < needed:
        raise ConfigError(f"transport.staging_slot_bytes is {slot_nbytes}; a token's KV of one layer takes up to {needed}")
    if nbytes < slot_nbytes:
        raise ConfigError(f"transport.staging_bytes is {nbytes}: not one slot of {slot_nbytes} (transport.staging_slot_bytes)")
