"""What a faulty transport does wrong. Read by faulty.py; built by tests, or from the environment in the processes of an end-to-end test."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from pd_serve.errors import ConfigError

FAULT_PLAN_VARIABLE = "PD_FAULT_PLAN"
"""JSON of a FaultPlan, for a transport that is created by name."""


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Probabilities are per operation, in [0, 1]. The default does nothing. Everything but `late_write` keeps the transport's contract."""

    inner: str = "loopback"
    """Name of the transport that does the work."""
    seed: int = 0
    delay_s: tuple[float, float] = (0.0, 0.0)
    """Least and most seconds each write, flush and notice is held back; order per peer is kept."""
    bandwidth: float = 0.0
    """Bytes per second that writes to one peer get; 0: unlimited."""
    notice_loss: float = 0.0
    notice_duplicate: float = 0.0
    notice_reorder: float = 0.0
    """Notices that are held for `reorder_s` while later ones pass."""
    reorder_s: float = 0.02
    flush_failure: float = 0.0
    """Flushes that end with ok=False although the bytes have arrived."""
    late_write: float = 0.0
    """BREAKS THE CONTRACT: batches that land `late_write_s` after their time, when their flush has long said ok. Proves a checker."""
    late_write_s: float = 0.05
    cut_after_s: tuple[tuple[str, float], ...] = ()
    """(worker id, seconds after its join): the peer is then lost, as if the network to it had failed."""
    cut_fenced_after_s: float = 0.0
    """Seconds from a cut to the knowledge that the peer can write no more; until then its one-sided writes still land. 0: known at once."""


def plan_from_environment(environ: Mapping[str, str] = os.environ) -> FaultPlan:
    """The plan in PD_FAULT_PLAN, or one without faults. Raises ConfigError."""
    text = environ.get(FAULT_PLAN_VARIABLE, "")
    if not text:
        return FaultPlan()
    try:
        return msgspec.json.decode(text, type=FaultPlan)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{FAULT_PLAN_VARIABLE}: {error}") from error
