"""A binding without a library: workers of one wire, whose endpoints deliver in order, lose what they are told to, and fail when told."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_serve.transport.ucx.seam import OK, Channel, Memory, Receiver
from tests.unit.transport.ucx.fake_endpoint import FakeEndpoint, FakeRequest


class WireEndpoint(FakeEndpoint):
    """To another worker of the wire. `is_deaf`: what is sent is lost, and nobody is told."""

    def __init__(self, target: WireWorker) -> None:
        super().__init__()
        self.is_deaf = False
        self._target = target

    def send(self, channel: Channel, header: bytes, address: int = 0, nbytes: int = 0) -> FakeRequest:
        if self.failure is None and not self.is_deaf:
            self._target.arrived.append((channel, header, ctypes.string_at(address, nbytes) if nbytes else b""))
        return FakeRequest(OK)


@dataclass(eq=False)
class WireWorker:
    wire: dict[bytes, WireWorker]
    efd: int = -1
    arrived: deque[tuple[Channel, bytes, bytes]] = field(default_factory=deque)
    endpoints: list[WireEndpoint] = field(default_factory=list)
    """All that were ever made, the oldest first."""
    receivers: dict[Channel, Receiver] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._address = b"worker %d" % len(self.wire)
        self.wire[self._address] = self

    def address(self) -> bytes:
        return self._address

    def progress(self) -> bool:
        """One message."""
        if not self.arrived:
            return False
        channel, header, payload = self.arrived.popleft()
        buffer = ctypes.create_string_buffer(payload, max(1, len(payload)))
        self.receivers[channel](header, ctypes.addressof(buffer), len(payload))
        return True

    def arm(self) -> bool:
        return not self.arrived

    def set_receiver(self, channel: Channel, receiver: Receiver) -> None:
        self.receivers[channel] = receiver

    def connect(self, address: bytes) -> WireEndpoint:
        endpoint = WireEndpoint(self.wire[address])
        self.endpoints.append(endpoint)
        return endpoint

    def close(self) -> None:
        self.arrived.clear()


@dataclass
class WireContext:
    wire: dict[bytes, WireWorker]

    def create_worker(self) -> WireWorker:
        return WireWorker(self.wire)

    def allocate(self, nbytes: int) -> Memory:
        raise NotImplementedError

    def register(self, address: int, nbytes: int) -> Memory:
        raise NotImplementedError

    def close(self) -> None: ...


@dataclass
class WireBinding:
    """Messages only, over `tcp`."""

    wire: dict[bytes, WireWorker] = field(default_factory=dict)
    name: str = "wire"
    version: str = "1.22.0"
    location: str = ""
    messaging: str = "am"

    def open_context(self, options: Mapping[str, str], one_sided: bool) -> WireContext:
        assert not one_sided
        return WireContext(self.wire)
