"""Whether the KV that a record speaks of is what its writer sent (`transport.verify`). Used by the transport thread only.

What each writer claims adds up to the digest of all that was to be written here under the lease (kv/digest.py). So the last of them to
complete carries the verdict over everybody's KV: the lease cannot be filled without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import Epoch, LeaseId, PeerId
from pd_serve.kv.digest import DIGEST_NBYTES, TokenSpan, digest_of_pool
from pd_serve.kv.layout import KVLayout
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import WriteWindow


@dataclass(slots=True)
class _Expected:
    epoch: Epoch
    span: TokenSpan
    missing: set[PeerId]
    claimed: int = 0
    """Sum of what those have claimed that are not missing any more."""


class Arrivals:
    def __init__(self, memory: NDArray[np.uint8], layout: KVLayout) -> None:
        """`memory` [nbytes]: this process's pool, of that layout."""
        self._memory, self._layout = memory, layout
        self._expected: dict[LeaseId, _Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, window: WriteWindow, span: TokenSpan) -> None:
        """`span`: what is to be written, by all of the window's writers together."""
        self._expected[window.lease_id] = _Expected(window.epoch, span, set(window.writers))

    def forget(self, lease_id: LeaseId) -> None:
        self._expected.pop(lease_id, None)

    def damage(self, peer: PeerId, notice: Completed) -> str:
        """What is wrong with the KV, as far as this record lets it be known; empty if nothing is.

        A record that is nobody's, or comes twice, is not judged here.
        """
        lease = self._expected.get(notice.lease_id)
        if lease is None or lease.epoch != notice.epoch or peer not in lease.missing:
            return ""
        if len(notice.digest) != DIGEST_NBYTES:
            return f"{peer} sends no digest of its KV: transport.verify is not set there"
        lease.missing.remove(peer)
        lease.claimed += _as_int(notice.digest)
        if lease.missing:
            return ""
        if lease.claimed % 2**64 != _as_int(digest_of_pool(self._memory, self._layout, lease.span)):
            return "the KV that arrived is not the KV that was sent"
        return ""


def _as_int(digest: bytes) -> int:
    return int.from_bytes(digest, "little")
