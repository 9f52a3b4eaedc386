"""The transports that the contract is asked of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from pd_serve.transport.fault_plan import FaultPlan
from pd_serve.transport.faulty import FaultyTransport
from pd_serve.transport.loopback import LoopbackTransport
from pd_serve.transport.loopback_fabric import LoopbackFabric
from pd_serve.transport.registry import TransportFactory


@dataclass(frozen=True)
class Implementation:
    """One transport on one data path. `factory()` raises ImportError where it cannot be had; its nodes find each other, and no others."""

    name: str
    lanes: str
    one_sided: bool
    factory: Callable[[], TransportFactory]


def _loopback() -> TransportFactory:
    return partial(LoopbackTransport, fabric=LoopbackFabric())


def _faultless() -> TransportFactory:
    return partial(FaultyTransport, plan=FaultPlan(), inner=_loopback())


def _slow() -> TransportFactory:
    """Late by up to 2 ms, 200 MB/s: slower, never wrong."""
    return partial(FaultyTransport, plan=FaultPlan(delay_s=(0.0, 0.002), bandwidth=2e8), inner=_loopback())


def _ucx() -> TransportFactory:
    factory: TransportFactory = import_module("pd_serve.transport.ucx.transport").UcxTransport
    return factory


def _nixl() -> TransportFactory:
    """Opens the library at once: where it is missing, the reason is known before any node is made."""
    import_module("pd_serve.transport.nixl.binding").NixlBinding("127.0.0.1")
    factory: TransportFactory = import_module("pd_serve.transport.nixl.transport").NixlTransport
    return factory


IMPLEMENTATIONS = (
    Implementation("loopback-one-sided", "shm", True, _loopback),
    Implementation("loopback-checked", "tcp", False, _loopback),
    Implementation("faulty-one-sided", "shm", True, _faultless),
    Implementation("faulty-checked", "tcp", False, _faultless),
    Implementation("slow-one-sided", "shm", True, _slow),
    Implementation("slow-checked", "tcp", False, _slow),
    Implementation("ucx-shm", "shm", True, _ucx),
    Implementation("ucx-tcp", "tcp", False, _ucx),
    Implementation("nixl-cma", "shm", True, _nixl),
    Implementation("nixl-tcp", "tcp", False, _nixl),
)
