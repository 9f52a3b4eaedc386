"""Why a request leaves the workers it was placed on, who is blamed for it, and what its client hears when there were too many such moves.

Words of router/lifecycle.py, in a file of their own for their number. Pure.
"""

from __future__ import annotations

from enum import Enum

from pd_serve.errors import AttemptError, EngineError, NoCapacityError, PeerLostError, PreemptedError, TransferError
from pd_serve.protocol.link import FailureReason, RefusalReason


class MoveReason(Enum):
    """Why an assignment is needed: label of pd_serve_moves_total for all but FIRST and NO_CAPACITY."""

    FIRST = "first"
    NO_CAPACITY = "no_capacity"
    PREEMPTED = "preempted"
    DRAINING = "draining"
    TRANSFER = "transfer_failed"
    PEER_LOST = "peer_lost"
    TIMEOUT = "timeout"
    ENGINE = "engine_error"
    REFUSED = "refused"


MOVE_REASONS = {
    FailureReason.PREEMPTED: MoveReason.PREEMPTED,
    FailureReason.TRANSFER: MoveReason.TRANSFER,
    FailureReason.PEER_LOST: MoveReason.PEER_LOST,
    FailureReason.TIMEOUT: MoveReason.TIMEOUT,
    FailureReason.ENGINE: MoveReason.ENGINE,
    FailureReason.REFUSED: MoveReason.REFUSED,
    FailureReason.DRAINING: MoveReason.DRAINING,
}
REFUSALS = {
    RefusalReason.NO_CAPACITY: MoveReason.NO_CAPACITY,
    RefusalReason.NOT_JOINED: MoveReason.PEER_LOST,
    RefusalReason.DRAINING: MoveReason.DRAINING,
    RefusalReason.DUPLICATE: MoveReason.REFUSED,
}
ORDERLY = frozenset({MoveReason.NO_CAPACITY, MoveReason.PREEMPTED, MoveReason.DRAINING})
PARTNER_FAULTS = frozenset({MoveReason.TRANSFER, MoveReason.PEER_LOST, MoveReason.TIMEOUT})
ERRORS: dict[MoveReason, type[AttemptError]] = {
    MoveReason.NO_CAPACITY: NoCapacityError,
    MoveReason.PREEMPTED: PreemptedError,
    MoveReason.TRANSFER: TransferError,
    MoveReason.PEER_LOST: PeerLostError,
    MoveReason.ENGINE: EngineError,
}
