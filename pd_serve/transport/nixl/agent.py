"""What an agent of NIXL says to others and hears from them: Worker, Endpoint and Request of seam.py. See binding.py.

Owned by the transport thread. NIXL's progress thread fills the list that `progress` empties; nothing here is called from it.
"""

from __future__ import annotations

import ctypes
import socket
from collections import deque
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pd_serve.clock import MonotonicClock
from pd_serve.errors import TransportError
from pd_serve.transport.nixl.connection import CREDIT, CREDIT_CHANNEL, FRAME, LIFE, LIFE_CHANNEL, AgentAddress, Remote, Transfer
from pd_serve.transport.ucx import seam

FAILED = -1
SIGN_OF_LIFE_S = 1.0
HURRY_S = 0.005
"""The doorbell is not what it announces, and may come first: for that long after it the worker does not let its owner sleep."""
MAX_RINGS = 64
"""Datagrams taken at once: anybody can send them."""
MAX_UNUSED = 64
"""Connections that are kept although no endpoint uses them."""


class NixlWorker:
    def __init__(self, api: Any, errors: tuple[type[Exception], ...], agent: Any, backend: int, name: str, host: str) -> None:
        self.api = api
        self.errors = errors
        self.agent = agent
        self.backend = backend
        self._name = name
        self._clock = MonotonicClock()
        self._doorbell, self._doorbell_address = _open_doorbell(host)
        self.efd: int = self._doorbell.fileno()
        self._receivers: dict[seam.Channel, seam.Receiver] = {}
        self._remotes: dict[str, Remote] = {}
        self._endpoints: dict[int, NixlEndpoint] = {}
        self._num_streams = 0
        self._transfers: list[Transfer] = []
        self._hurry_until = 0.0
        self._next_sign_of_life = 0.0

    def address(self) -> bytes:
        metadata = self.agent.getLocalPartialMD(self.api.nixlRegDList(self.api.DRAM_SEG), True, [self.backend])
        return msgspec.msgpack.encode(AgentAddress(self._name, self._doorbell_address, bytes(metadata)))

    def set_receiver(self, channel: seam.Channel, receiver: seam.Receiver) -> None:
        self._receivers[channel] = receiver

    # ---- progress

    def progress(self) -> bool:
        now = self._clock.now()
        if self._drain_doorbell():
            self._hurry_until = now + HURRY_S
        moved = False
        for name, messages in self.agent.getNotifs({}, [self.backend]).items():
            moved = True
            self._hurry_until = 0.0
            for message in messages:
                self._handle(name, message)
        for remote in tuple(self._remotes.values()):
            for stream in remote.uncredited:
                self.send(remote, CREDIT.pack(CREDIT_CHANNEL, stream, remote.handled[stream], 0))
            remote.uncredited.clear()
        if self._transfers:
            waiting = [transfer for transfer in self._transfers if not self._has_ended(transfer)]
            moved |= len(waiting) != len(self._transfers)
            self._transfers = waiting
        if now >= self._next_sign_of_life:
            self._next_sign_of_life = now + SIGN_OF_LIFE_S
            self._show_life()
        return moved

    def arm(self) -> bool:
        return not self._transfers and self._clock.now() >= self._hurry_until

    def _show_life(self) -> None:
        """A message to every connection: one that has failed shows in the sending, one that loses messages in the answer."""
        for endpoint in tuple(self._endpoints.values()):
            if endpoint.num_credited < endpoint.num_data:
                self.send(endpoint.remote, LIFE.pack(LIFE_CHANNEL, endpoint.stream, endpoint.num_data))
        for remote in tuple(self._remotes.values()):
            self.send(remote, bytes((LIFE_CHANNEL,)), ring=False)
            if remote.failure is not None and remote.num_endpoints == 0:
                self._disconnect(remote)

    def _drain_doorbell(self) -> bool:
        rang = False
        for _ in range(MAX_RINGS):
            try:
                self._doorbell.recv(1)
            except BlockingIOError:
                break
            rang = True
        return rang

    def _handle(self, name: str, message: bytes) -> None:
        """From anyone, and anything."""
        remote = self._remotes.get(name)
        if len(message) == CREDIT.size and message[0] == CREDIT_CHANNEL:
            _, stream, count, asked = CREDIT.unpack(message)
            endpoint = self._endpoints.get(stream)
            if endpoint is not None and endpoint.remote is remote:
                endpoint.credit(count, asked)
            return
        if len(message) == LIFE.size and message[0] == LIFE_CHANNEL:
            _, stream, asked = LIFE.unpack(message)
            if remote is not None:
                self.send(remote, CREDIT.pack(CREDIT_CHANNEL, stream, remote.handled.get(stream, 0), asked))
            return
        if len(message) < FRAME.size:
            return
        channel, header_nbytes, stream = FRAME.unpack_from(message)
        start = FRAME.size + header_nbytes
        if start > len(message) or channel not in self._receivers:
            return
        address = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
        self._receivers[seam.Channel(channel)](message[FRAME.size : start], address + start, len(message) - start)
        if channel == seam.Channel.DATA and remote is not None:
            remote.handled[stream] = remote.handled.get(stream, 0) + 1
            remote.uncredited.add(stream)

    # ---- others

    def connect(self, address: bytes) -> NixlEndpoint:
        try:
            known = msgspec.msgpack.decode(address, type=AgentAddress)
        except msgspec.MsgspecError as error:
            raise TransportError(f"NIXL: not an agent's address: {error}") from error
        remote = self._remotes.get(known.name)
        if remote is not None and remote.failure is not None:
            self._disconnect(remote)
            remote = None
        if remote is None:
            try:
                self.agent.loadRemoteMD(known.metadata)
            except self.errors as error:
                raise TransportError(f"NIXL: connecting: {error}") from error
            remote = self._remotes[known.name] = Remote(known.name, known.doorbell)
        remote.num_endpoints += 1
        self._num_streams += 1
        endpoint = self._endpoints[self._num_streams] = NixlEndpoint(self, remote, self._num_streams)
        return endpoint

    def send(self, remote: Remote, message: bytes, ring: bool = True) -> None:
        if remote.failure is not None:
            return
        try:
            self.agent.genNotif(remote.name, message, [self.backend])
        except self.errors as error:
            remote.failure = _text(error)
            return
        if ring:
            self.ring(remote)

    def ring(self, remote: Remote) -> None:
        try:
            self._doorbell.sendto(b"", remote.doorbell)
        except OSError:
            return  # it looks by itself, later

    def post(self, remote: Remote, local: np.ndarray, target: np.ndarray) -> Transfer | None:
        """Both [n, 3], uint64: address, length, 0. None when it is done, or has failed."""
        segment = self.api.DRAM_SEG
        handle: int | None = None
        try:
            handle = self.agent.createXferReq(
                self.api.NIXL_WRITE,
                self.api.nixlXferDList(segment, local),
                self.api.nixlXferDList(segment, target),
                remote.name,
                "",
                [self.backend],
            )
            status = self.agent.postXferReq(handle)
        except self.errors as error:
            remote.failure = remote.failure or _text(error)
            status = None
        if handle is None:
            return None
        transfer = Transfer(remote, handle)
        if status == self.api.NIXL_IN_PROG:
            self._transfers.append(transfer)
            return transfer
        self._release(transfer)
        return None

    def leave(self, endpoint: NixlEndpoint) -> None:
        """The connection stays for whoever connects to the agent next: UCX may pair a new one with the half that the other side still has
        of the old one, and messages over such a pair are lost. It goes when it fails, or when there are too many that nobody uses."""
        self._endpoints.pop(endpoint.stream, None)
        endpoint.remote.num_endpoints -= 1
        unused = [remote for remote in self._remotes.values() if remote.num_endpoints == 0]
        for remote in unused[: max(0, len(unused) - MAX_UNUSED)]:
            self._disconnect(remote)

    def load_key(self, packed: bytes) -> None:
        try:
            self.agent.loadRemoteMD(packed)
        except self.errors as error:
            raise TransportError(f"NIXL: unpacking a key: {error}") from error

    def close(self) -> None:
        for remote in tuple(self._remotes.values()):
            self._disconnect(remote)
        self._doorbell.close()
        self._receivers.clear()
        self._endpoints.clear()
        self.agent = None

    def _disconnect(self, remote: Remote) -> None:
        del self._remotes[remote.name]
        remote.failure = remote.failure or "closed"
        for transfer in [transfer for transfer in self._transfers if transfer.remote is remote]:
            self._transfers.remove(transfer)
            self._release(transfer)
        try:
            self.agent.invalidateRemoteMD(remote.name)
        except self.errors:
            return  # NIXL has dropped it already

    def _has_ended(self, transfer: Transfer) -> bool:
        try:
            if self.agent.getXferStatus(transfer.handle) == self.api.NIXL_IN_PROG:
                return False
        except self.errors as error:
            transfer.remote.failure = transfer.remote.failure or _text(error)
        self._release(transfer)
        return True

    def _release(self, transfer: Transfer) -> None:
        transfer.is_done = True
        try:
            self.agent.releaseXferReq(transfer.handle)
        except self.errors:
            return  # still in progress on a connection that has failed: NIXL keeps it


class NixlRequest:
    """Done when its endpoint has been credited that far, or the transfers are done."""

    __slots__ = ("_endpoint", "_position", "_transfers")

    def __init__(self, endpoint: NixlEndpoint, position: int = 0, transfers: Sequence[Transfer] = ()) -> None:
        self._endpoint = endpoint
        self._position = position
        self._transfers = transfers

    def poll(self) -> int:
        if self._endpoint.failure is not None:
            return FAILED
        is_done = self._endpoint.num_credited >= self._position and all(transfer.is_done for transfer in self._transfers)
        return seam.OK if is_done else seam.IN_PROGRESS

    def release(self) -> None:
        """Nothing is held for it."""


class NixlKey(NamedTuple):
    """Loaded into the agent; goes with the connection."""

    name: str

    def address_here(self, address: int, nbytes: int) -> int | None:
        """NIXL writes into processes, it maps nothing of them."""
        return None

    def close(self) -> None: ...


class NixlEndpoint:
    def __init__(self, worker: NixlWorker, remote: Remote, stream: int) -> None:
        self._worker = worker
        self.remote = remote
        self.stream = stream
        self.num_credited = 0
        self.num_data = 0
        self._owed = 0
        """Data messages sent before a sign of life that was answered while some of them were missing."""
        self._transfers: deque[Transfer] = deque()
        self._is_closed = False

    @property
    def failure(self) -> str | None:
        return "closed" if self._is_closed else self.remote.failure

    def credit(self, count: int, asked: int) -> None:
        """Messages arrive in order, so what is missing when a later one is answered, and a second later still, was lost.

        UCX does that where it has paired the two sides' connections wrongly: small messages arrive, large ones do not.
        """
        self.num_credited = max(self.num_credited, min(count, self.num_data))
        if not asked:
            return
        if count < self._owed:
            self.remote.failure = self.remote.failure or f"{self._owed - count} messages were lost"
        self._owed = asked if count < asked else 0

    def unpack_key(self, packed: bytes) -> NixlKey:
        self._worker.load_key(packed)
        return NixlKey(self.remote.name)

    def put(
        self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int], key: seam.RemoteKey, memory: seam.Memory | None
    ) -> int:
        if self.failure is not None or not sizes:
            return 0
        lists = np.zeros((2, len(sizes), 3), np.uint64)
        lists[0, :, 0], lists[1, :, 0] = local, remote
        lists[:, :, 1] = sizes
        transfer = self._worker.post(self.remote, lists[0], lists[1])
        if transfer is None:
            return 0
        self._transfers.append(transfer)
        return len(sizes)

    def flush(self) -> NixlRequest:
        """A transfer of NIXL is done when its bytes are there: it flushes before it says so."""
        while self._transfers and self._transfers[0].is_done:
            self._transfers.popleft()
        return NixlRequest(self, transfers=tuple(self._transfers))

    def send(self, channel: seam.Channel, header: bytes, address: int = 0, nbytes: int = 0) -> NixlRequest:
        payload = ctypes.string_at(address, nbytes) if nbytes else b""
        self._worker.send(self.remote, FRAME.pack(channel, len(header), self.stream) + header + payload)
        if channel is seam.Channel.DATA:
            self.num_data += 1
            return NixlRequest(self, self.num_data)
        return NixlRequest(self)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._worker.leave(self)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _open_doorbell(host: str) -> tuple[socket.socket, tuple[str, int]]:
    """A socket that does not block, and where others reach it. Raises TransportError when `host` is no name or address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        doorbell = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise TransportError(f"NIXL: no address {host}: {error}") from error
    reached_at = str(address[0])
    try:
        doorbell.bind(address)
    except OSError:
        # An address that others reach this machine by, but not one of its own.
        doorbell.bind(("::" if family is socket.AF_INET6 else "0.0.0.0", 0))
    if ip_address(reached_at).is_unspecified:
        reached_at = _outward_address(family)
    return doorbell, (reached_at, doorbell.getsockname()[1])


def _outward_address(family: socket.AddressFamily) -> str:
    """The address of this machine towards others; of the loopback interface where there is no way out. Sends nothing."""
    documentation, loopback = ("2001:db8::1", "::1") if family is socket.AF_INET6 else ("192.0.2.1", "127.0.0.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((documentation, 9))
        except OSError:
            return loopback
        return str(probe.getsockname()[0])
