"""Where a process listens and how others reach it. Used by router, workers and the launcher; pure but for asking the system for a route."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from pd_serve.errors import ConfigError, ProtocolError


def is_loopback(host: str) -> bool:
    """False for a name other than localhost: what it resolves to may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    return host in ("0.0.0.0", "::", "")


def require_secret_beyond_loopback(host: str, cluster_secret: str) -> None:
    """Raises ConfigError when anyone on the network could command this process."""
    if not cluster_secret and not is_loopback(host):
        raise ConfigError(
            f"security.cluster_secret is needed to listen on {host}: set the same secret on routers and workers, or use 127.0.0.1"
        )


def http_address(host: str, port: int, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def split_address(address: str) -> tuple[bool, str, int]:
    """(is it https, host, port) of `http://host:port`. Raises ProtocolError."""
    try:
        parts = urlsplit(address)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError as error:
        raise ProtocolError(f"worker address {address!r} is not http://host:port: {error}") from error
    if scheme not in ("http", "https") or not host or not host.isprintable() or port == 0:
        raise ProtocolError(f"worker address {address!r} is not http://host:port")
    return scheme == "https", host, port or (443 if scheme == "https" else 80)


def advertised_host(listen_host: str, advertise: str, routers: Sequence[str]) -> str:
    """What to register as: `advertise`, else the listening address, else (a wildcard) our address on the way to the first router."""
    if advertise:
        return advertise
    if not is_wildcard(listen_host):
        return listen_host
    for router in routers:
        parts = urlsplit(router)
        if parts.hostname:
            try:
                return _local_address_towards(parts.hostname, parts.port or 80)
            except OSError:
                continue
    return socket.gethostname()


def bound_socket(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Bound, not listening; nobody else gets the port while it is open, but other sockets of this user with `is_shared`, among which the
    kernel shares connections out (SO_REUSEPORT). The caller closes it. Raises ConfigError, one line.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


def _local_address_towards(host: str, port: int) -> str:
    """Connecting a datagram socket sends nothing: it only asks for the route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
