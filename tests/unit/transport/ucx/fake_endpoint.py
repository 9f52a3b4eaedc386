"""An endpoint without a library: what was put and sent, and requests that finish when told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from pd_serve.transport.ucx.seam import IN_PROGRESS, OK, Channel, Memory, RemoteKey


class FakeRequest:
    def __init__(self, status: int) -> None:
        self.status = status
        self.is_released = False

    def poll(self) -> int:
        return self.status

    def release(self) -> None:
        self.is_released = True


class FakeKey:
    def address_here(self, address: int, nbytes: int) -> int | None:
        return None

    def close(self) -> None:
        pass


class FakeEndpoint:
    def __init__(self, puts_are_inline: bool = True, sends_are_inline: bool = True) -> None:
        self.failure: str | None = None
        self.puts: list[tuple[int, int, int]] = []
        self.sent: list[tuple[Channel, bytes, bytes]] = []
        self.sends: list[FakeRequest] = []
        self.flushes: list[FakeRequest] = []
        self._puts_are_inline = puts_are_inline
        self._sends_are_inline = sends_are_inline

    def unpack_key(self, packed: bytes) -> RemoteKey:
        return FakeKey()

    def put(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], key: RemoteKey, memory: Memory | None) -> int:
        self.puts += zip(local, remote, sizes, strict=True)
        return 0 if self._puts_are_inline else len(sizes)

    def flush(self) -> FakeRequest:
        self.flushes.append(FakeRequest(IN_PROGRESS))
        return self.flushes[-1]

    def send(self, channel: Channel, header: bytes, address: int = 0, nbytes: int = 0) -> FakeRequest:
        self.sent.append((channel, header, ctypes.string_at(address, nbytes) if nbytes else b""))
        self.sends.append(FakeRequest(OK if self._sends_are_inline else IN_PROGRESS))
        return self.sends[-1]

    def close(self) -> None:
        self.failure = "closed"
