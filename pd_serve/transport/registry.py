"""Names of the transports. Each implementation is imported only when asked for: its library stays inside its own file."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pd_serve.errors import ConfigError
from pd_serve.transport.base import EventSink, Transport, TransportSettings

TransportFactory = Callable[[TransportSettings, EventSink], Transport]

_FACTORIES = {
    "ucx": "pd_serve.transport.ucx.transport:UcxTransport",
    "nixl": "pd_serve.transport.nixl.transport:NixlTransport",
    "loopback": "pd_serve.transport.loopback:LoopbackTransport",
    "faulty": "pd_serve.transport.faulty:FaultyTransport",
}


def transport_names() -> tuple[str, ...]:
    return tuple(_FACTORIES)


def transport_factory(name: str) -> TransportFactory:
    """Raises ConfigError for an unknown name, TransportUnavailableError when its library is missing."""
    if name not in _FACTORIES:
        raise ConfigError(f"unknown transport {name!r}; known: {', '.join(_FACTORIES)}")
    module_name, _, attribute = _FACTORIES[name].partition(":")
    factory: TransportFactory = getattr(import_module(module_name), attribute)
    return factory
