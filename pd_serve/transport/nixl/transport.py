"""The `nixl` transport: the transport of ucx/ (its join, its sessions, its two data paths), with NIXL making the calls instead of UCX.

shm     one-sided: NIXL WRITEs over process_vm_writev (`cma`), messages over tcp
rdma    one-sided: NIXL WRITEs; never run on hardware here
tcp     checked: NIXL would put over tcp, too, but bytes of such puts still lie in the receiver's socket when their writer has died, so
        that its death would fence nothing. They travel in notifications, which the receiver checks against its windows.
"""

from __future__ import annotations

import msgspec

from pd_serve.clock import Clock, MonotonicClock
from pd_serve.errors import TransportError
from pd_serve.transport.base import EventSink, PeerJoined, Region, TransportEvent, TransportSettings
from pd_serve.transport.nixl.binding import NixlBinding
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.transport import UcxTransport

IDLE_LOOK_S = 0.05
"""How long a message can lie unseen whose doorbell was lost on the way."""


class NixlTransport(UcxTransport):
    """Raises TransportUnavailableError when NIXL is not installed, ConfigError for an unknown lane."""

    name = "nixl"

    def __init__(self, settings: TransportSettings, sink: EventSink, clock: Clock | None = None) -> None:
        clock = clock or MonotonicClock()

        def renamed(event: TransportEvent) -> None:
            sink(msgspec.structs.replace(event, lane=_label(event.lane)) if isinstance(event, PeerJoined) else event)

        super().__init__(settings, renamed, NixlBinding(settings.host), clock)
        self._idle_clock = clock

    def register_pool(self, address: int, nbytes: int, device: str) -> Region:
        if device != "cpu":
            raise TransportError("transport nixl takes no pools in GPU memory here; use transport.name = ucx")
        return super().register_pool(address, nbytes, device)

    def next_deadline(self) -> float | None:
        deadline = super().next_deadline()
        look_at = self._idle_clock.now() + IDLE_LOOK_S
        return look_at if deadline is None else min(deadline, look_at)

    def lanes(self) -> tuple[str, ...]:
        return tuple(_label(lane) for lane in super().lanes())


def _label(lane: str) -> str:
    return "cma" if lane == Lane.SHM.label else lane
