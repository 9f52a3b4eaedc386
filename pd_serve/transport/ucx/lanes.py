"""Which lanes there are, how UCX is configured for each, and which one two peers use. Both peers decide alike from the same facts.

One UCX context per lane. The context that listens on tcp has no RMA feature and does not offer puts: UCX applies a put that arrives there
without any check and can abort the target when the writer dies, so on tcp bytes travel as messages. The contexts with RMA have lanes where
a put needs nobody on the other side: shared memory that UCX allocated, and RDMA devices.

What no setting closes: UCX's tcp transport carries out put requests below all features, for whoever forges the capabilities in an address
or speaks its protocol by hand. So the port must be reachable from the cluster's own hosts only: it is bound to one interface here, and a
firewall has to do the rest.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from pd_serve.errors import ConfigError

SIOCGIFADDR = 0x8915
KEEPALIVE_INTERVAL = "1s"
"""How soon UCX itself notices a dead shared-memory peer (pidfds are sooner); each interval is a wake-up or two, and cold ones are dear."""


class Lane(Enum):
    """Best first. The value is the name in settings; `label` the one in logs and metrics."""

    SHM = "shm"
    RDMA = "rdma"
    TCP = "tcp"

    @property
    def label(self) -> str:
        return {"shm": "posix", "rdma": "rdma", "tcp": "tcp"}[self.value]

    @property
    def one_sided(self) -> bool:
        """Puts on this lane are carried out without the target's process."""
        return self is not Lane.TCP


def wanted_lanes(setting: str) -> tuple[Lane, ...]:
    """The lanes that `TransportConfig.lanes` allows, best first. Raises ConfigError."""
    if setting == "auto":
        return tuple(Lane)
    try:
        return (Lane(setting),)
    except ValueError as error:
        raise ConfigError(f"unknown lane {setting!r}: auto, {', '.join(lane.value for lane in Lane)}") from error


def choose_lane(mine: Sequence[Lane], theirs: Sequence[Lane], same_host: bool) -> Lane | None:
    """The best lane both have; shared memory only between processes that can share it. Symmetric in its arguments."""
    for lane in Lane:
        if lane in mine and lane in theirs and (same_host or lane is not Lane.SHM):
            return lane
    return None


def lane_options(lane: Lane, host: str, device: str) -> Mapping[str, str]:
    """UCX options of the lane's context. `host` binds tcp to the interface with that address; `device` is that of the pool."""
    cuda = device.startswith("cuda")
    options = {"KEEPALIVE_INTERVAL": KEEPALIVE_INTERVAL}
    if lane is Lane.SHM:
        options["TLS"] = "posix,self,cuda_copy,cuda_ipc" if cuda else "posix,self"
        # Without it an endpoint that reports failures gets no shared-memory lane at all.
        options["POSIX_ERROR_HANDLING"] = "y"
        # A pool that is not shared memory would be written by emulated puts: fail instead (pool.py falls back to messages).
        options["ALLOC_PRIO"] = "md:posix"
    elif lane is Lane.TCP:
        options["TLS"] = "tcp,cuda_copy" if cuda else "tcp"
        # UCX's tcp transport itself carries out put requests, below all features; without this its address invites them.
        options["TCP_PUT_ENABLE"] = "n"
        options["TCP_CONN_NB"] = "y"  # connect() to an address that does not answer must not block the owner thread
        # A data message arrives in one segment: in several, UCX first collects it in fresh memory, which doubles the cost there.
        options["TCP_RX_SEG_SIZE"] = "288kb"
        options["ZCOPY_THRESH"] = "8kb"
        interface = interface_of(host)
        if interface is not None:
            options["NET_DEVICES"] = interface
    else:
        # Never run on hardware here: reliable connections, unreliable datagrams for the wire-up.
        options["TLS"] = "rc,ud,cuda_copy,cuda_ipc" if cuda else "rc,ud"
    return options


def rdma_devices(sysfs: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Names of the InfiniBand and RoCE devices of this machine."""
    return tuple(sorted(entry.name for entry in sysfs.iterdir())) if sysfs.is_dir() else ()


def interface_of(host: str) -> str | None:
    """Name of the network interface that has this address; None for a wildcard or an address of no interface (then all are used)."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
