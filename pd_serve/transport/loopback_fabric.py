"""What stands in for network and shared memory when several loopback transports live in one process: ports, and the fabric they hang on.

A port is the part of a transport that others may touch, from any thread: an inbox with an eventfd, and the pool that one-sided writes
land in. Everything else of a transport belongs to its owner thread. A port's lock is held for one append or one copy; no two are ever
held at once.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import Epoch, LeaseId, PeerId


@dataclass(frozen=True, slots=True)
class Hello:
    """First word to a peer: who speaks, whom it means, what it can do, and a keyed digest of all that."""

    sender: PeerId
    receiver: PeerId
    paths: tuple[str, ...]
    host_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class HelloAck:
    """The receiver knows the sender and accepts its hello."""


@dataclass(frozen=True, slots=True)
class HelloRefused:
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class CheckedWrite:
    """Up to a window's worth of ops ([n, 3]); `source` is the writer's pool, which must not change before the flush."""

    lease_id: LeaseId
    epoch: Epoch
    ops: NDArray[np.int64]
    source: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Credit:
    """One CheckedWrite has left the inbox."""


@dataclass(frozen=True, slots=True)
class FlushAsked:
    token: int


@dataclass(frozen=True, slots=True)
class FlushAnswered:
    token: int
    violations: int
    """CheckedWrites since the last answer that a live window refused."""


@dataclass(frozen=True, slots=True)
class NoticeSent:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender has let go of the receiver and writes to it no more."""

    detail: str


Message = Hello | HelloAck | HelloRefused | CheckedWrite | Credit | FlushAsked | FlushAnswered | NoticeSent | Bye


class Port:
    """One transport as the others see it. Created and closed by its owner."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.port_id = secrets.randbits(63)
        self.pool: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._inbox: deque[tuple[Port, Message]] = deque()
        self._watchers: set[Port] = set()
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def has_mail(self) -> bool:
        return bool(self._inbox)

    def post(self, sender: Port, message: Message) -> bool:
        """Append to the inbox and wake the owner; False when the port is closed. Any thread."""
        with self._lock:
            if not self._open:
                return False
            self._inbox.append((sender, message))
            os.eventfd_write(self._fd, 1)
            return True

    def take(self) -> tuple[Port, Message] | None:
        """Owner only."""
        return self._inbox.popleft() if self._inbox else None

    def clear_wake(self) -> None:
        """Make `fd` unreadable until the next post. Owner only."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def copy_out(self, target: Port, ops: NDArray[np.int64]) -> bool:
        """A one-sided write: from this port's pool into the target's, unasked. False once this port is closed: it can write no more.

        A closed target's memory outlives it, as a shared-memory segment does, and stays writable.
        """
        with self._lock:
            if not self._open:
                return False
            copy_ranges(target.pool, self.pool, ops)
            return True

    def watch(self, watcher: Port) -> bool:
        """Have `watcher` get a Bye when this port closes; False when it already has. Any thread."""
        with self._lock:
            if self._open:
                self._watchers.add(watcher)
            return self._open

    def unwatch(self, watcher: Port) -> None:
        with self._lock:
            self._watchers.discard(watcher)

    def close(self, detail: str) -> None:
        """After this nothing is accepted and no write of this port lands; watchers are told. Idempotent, any thread."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._inbox.clear()
            os.eventfd_write(self._fd, 1)
            watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.post(self, Bye(detail))

    def release_fd(self) -> None:
        """Owner only, after close; `fd` is -1 from here on."""
        with self._lock:
            descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class LoopbackFabric:
    """Finds a port by the id in its owner's metadata. Thread-safe; holds no port alive."""

    def __init__(self) -> None:
        self._ports: weakref.WeakValueDictionary[int, Port] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def attach(self, port: Port) -> None:
        with self._lock:
            self._ports[port.port_id] = port

    def find(self, port_id: int) -> Port | None:
        with self._lock:
            return self._ports.get(port_id)


@functools.cache
def named_fabric(name: str) -> LoopbackFabric:
    """One fabric per name and process: what a transport joins when it is created by name and cannot be handed a fabric."""
    return LoopbackFabric()


def copy_ranges(target: NDArray[np.uint8], source: NDArray[np.uint8], ops: NDArray[np.int64]) -> None:
    """Copy each [source offset, target offset, length] of ops ([n, 3]); the caller has checked the bounds."""
    for source_offset, target_offset, nbytes in ops.tolist():
        target[target_offset : target_offset + nbytes] = source[source_offset : source_offset + nbytes]
