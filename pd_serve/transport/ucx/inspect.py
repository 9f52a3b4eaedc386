"""What UCX offers on this machine, for `doctor` and for support: opens the library as a transport would, and lets go of it."""

from __future__ import annotations

import msgspec

from pd_serve.transport.base import TransportSettings
from pd_serve.transport.ucx.bindings import open_binding
from pd_serve.transport.ucx.lanes import interface_of, rdma_devices
from pd_serve.transport.ucx.ports import Ports


class UcxReport(msgspec.Struct, frozen=True):
    binding: str
    version: str
    location: str
    """File the library was loaded from."""
    lanes: tuple[str, ...]
    """Best first."""
    interface: str
    """Network interface that tcp is bound to; empty: all."""
    rdma_devices: tuple[str, ...]


def inspect_ucx(settings: TransportSettings) -> UcxReport:
    """Raises TransportUnavailableError, ConfigError."""
    binding = open_binding(settings.binding)
    ports = Ports(binding, settings, "cpu")
    lanes = tuple(lane.label for lane in ports.lanes)
    ports.close_workers()
    ports.close_contexts()
    return UcxReport(binding.name, binding.version, binding.location, lanes, interface_of(settings.host) or "", rdma_devices())
