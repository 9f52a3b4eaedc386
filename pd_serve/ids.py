"""Identities used at process boundaries. Each is a NewType so that a lease id is never passed where a block id is meant.

Peers are known by (WorkerId, Incarnation), never by address: a worker that restarts on the same port is a new incarnation.
"""

from __future__ import annotations

import secrets
from typing import NewType

import msgspec

WorkerId = NewType("WorkerId", str)
"""Name of a worker, stable over its restarts (configured, or host-role-port)."""
Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn when a worker process starts."""
RouterId = NewType("RouterId", str)
RequestId = NewType("RequestId", str)
"""A client's request, as in the OpenAI response id. Lives in the router only."""
AttemptId = NewType("AttemptId", int)
"""One try at serving one choice of a request on one (prefill, decode) pair; never reused. All that workers know a request by."""
LeaseId = NewType("LeaseId", int)
"""A grant of blocks to a remote writer; unique within one decode incarnation."""
Epoch = NewType("Epoch", int)
"""Random number of a lease; a record or message of another epoch is counted and dropped."""
BlockId = NewType("BlockId", int)
LinkId = NewType("LinkId", int)
"""A live link between one router and one worker front; unique within that front's process."""


class PeerId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A worker process: the same worker id with another incarnation is another peer."""

    worker_id: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation:016x}"


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.randbits(63))


def new_epoch() -> Epoch:
    return Epoch(secrets.randbits(63))
