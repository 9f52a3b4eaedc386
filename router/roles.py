"""When to give a worker another role: which phase is short of workers, which can spare one, and for how long that must have been so. Pure.

A phase is short when its use is at `high_use` or above, when requests wait for it, or when what it answers for (prefill: time to first
token; decode: the gap between tokens) is met too rarely. It can spare a worker when its use is at `low_use` or below and the workers left
would still be below `high_use`. Both at once for `hold_s`: the least loaded worker of the phase that can spare one changes sides.

What must stay true: one worker of each role is always left; two switches, or a switch and a change of the fleet, are `min_dwell_s` apart.
Workers of both phases keep out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pd_serve.config import RolesConfig
from pd_serve.ids import PeerId
from pd_serve.protocol.link import Role


class WorkerUse(msgspec.Struct, frozen=True):
    """One worker that takes new requests, by its last report."""

    peer: PeerId
    role: Role
    prefill_use: float
    """Prompt tokens ahead, in steps; 1 is a full step or more."""
    decode_use: float
    """Share of its KV, or of its sequences, that is in use: whichever is more."""
    num_tokens: int
    """It holds or has ahead: the least is the least loaded."""


class Look(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    workers: tuple[WorkerUse, ...]
    num_queued: int
    """Requests that wait in the router, all its processes."""
    ttft_attainment: float | None = None
    """Share that met the objective lately; None: not known, or there is none."""
    itl_attainment: float | None = None


class Switch(msgspec.Struct, frozen=True):
    peer: PeerId
    role: Role
    reason: str
    """Label of pd_serve_role_switches_total."""


@dataclass(frozen=True, slots=True)
class _Need:
    role: Role
    reason: str


class RoleController:
    """`decide` with every look, at least as often as `hold_s`."""

    def __init__(self, settings: RolesConfig) -> None:
        self._settings = settings
        self._roles: dict[PeerId, Role] | None = None
        self._changed_at = float("-inf")
        self._need: _Need | None = None
        self._needed_since = 0.0

    def decide(self, look: Look, now: float) -> Switch | None:
        """`now`: monotonic seconds."""
        roles = {worker.peer: worker.role for worker in look.workers}
        if roles != self._roles:  # whoever did it: loads have to settle first
            self._changed_at = now if self._roles is not None else self._changed_at
            self._roles, self._need = roles, None
        need = _need_of(look, self._settings)
        if need is None or self._need is None or need.role is not self._need.role:
            self._needed_since = now
        self._need = need
        if need is None or now - self._needed_since < self._settings.hold_s or now - self._changed_at < self._settings.min_dwell_s:
            return None
        spared = min(_of(look, _OTHER[need.role]), key=lambda worker: (worker.num_tokens, worker.peer))
        self._changed_at, self._need = now, None
        return Switch(spared.peer, need.role, need.reason)


_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def _need_of(look: Look, settings: RolesConfig) -> _Need | None:
    """What is short while the other is not, and can spare a worker."""
    prefills, decodes = _of(look, Role.PREFILL), _of(look, Role.DECODE)
    if not prefills or not decodes:
        return None
    prefill_use = sum(worker.prefill_use for worker in prefills) / len(prefills)
    decode_use = sum(worker.decode_use for worker in decodes) / len(decodes)
    # What waits in the router waits for prefill, unless there is no room to decode it.
    is_queue_long = look.num_queued >= settings.queue_per_worker * len(prefills) and decode_use < settings.high_use
    prefill_short = "queue" if is_queue_long else "ttft" if _is_missed(look.ttft_attainment, settings) else ""
    decode_short = "kv" if decode_use >= settings.high_use else "itl" if _is_missed(look.itl_attainment, settings) else ""
    if prefill_short and not decode_short and _can_spare(decode_use, len(decodes), settings):
        return _Need(Role.PREFILL, prefill_short)
    if decode_short and not prefill_short and _can_spare(prefill_use, len(prefills), settings):
        return _Need(Role.DECODE, decode_short)
    return None


def _can_spare(use: float, num_workers: int, settings: RolesConfig) -> bool:
    return num_workers > 1 and use <= settings.low_use and use * num_workers / (num_workers - 1) < settings.high_use


def _is_missed(attainment: float | None, settings: RolesConfig) -> bool:
    return attainment is not None and attainment < settings.attainment


def _of(look: Look, role: Role) -> Sequence[WorkerUse]:
    return [worker for worker in look.workers if worker.role is role]
