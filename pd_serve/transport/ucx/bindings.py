"""Which binding of UCX is used. `auto` prefers ucx-py where it is installed, else libucp through ctypes."""

from __future__ import annotations

from pd_serve.errors import ConfigError, TransportUnavailableError
from pd_serve.transport.ucx.libucp import LibucpBinding
from pd_serve.transport.ucx.seam import Binding
from pd_serve.transport.ucx.ucxpy import UcxPyBinding

BINDING_NAMES = ("auto", "ucxpy", "libucp")


def open_binding(name: str) -> Binding:
    """Raises ConfigError for an unknown name, TransportUnavailableError when no library is found."""
    if name == "libucp":
        return LibucpBinding()
    if name == "ucxpy":
        return UcxPyBinding()
    if name != "auto":
        raise ConfigError(f"unknown UCX binding {name!r}: {', '.join(BINDING_NAMES)}")
    try:
        return UcxPyBinding()
    except TransportUnavailableError:
        return LibucpBinding()
