"""`python -m pd_serve.bench.transfer_node`: one transport in a process of its own, which does what transfer.py tells it.

One command per line on stdin, one answer per line on stdout, JSON. Between commands, and while it waits for a flush, it drives the
transport as a worker's transport thread does: progress while something moves, else arm and sleep on the descriptors.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import select
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import numpy as np

from pd_serve.bench.transfer_cases import Case, Ops, num_bytes, plan_passes
from pd_serve.errors import PdServeError, TransportError
from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.base import Flushed, PeerJoined, Transport, TransportEvent, TransportSettings, WriteBatch, WriteWindow
from pd_serve.transport.registry import transport_factory

LEASE, EPOCH = LeaseId(1), Epoch(1)
TIMEOUT_S = 60.0


class Open(msgspec.Struct, frozen=True, tag="open"):
    name: str
    transport: str
    lanes: str
    host_id: str
    pool_nbytes: int
    core: int
    """The process stays on that core; -1: on any."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join a peer, and allow it to write all of the pool."""

    name: str
    metadata: bytes


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """Write one case `rounds` times, in turns with copies of as much within this process; the first round is not counted."""

    case: Case
    rounds: int


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Of the bytes that the first pass of a case moved: as read here, or as written there."""

    case: Case
    is_target: bool


Command = Open | Join | Measure | Digest


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    metadata: bytes
    library: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    lane: str
    one_sided: bool


class Took(msgspec.Struct, frozen=True, array_like=True):
    wall_s: float
    cpu_s: float
    """Processor time of the thread that did it."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """What each round took. Round i of every list moved as many bytes, in as many ranges, at the same time."""

    nbytes: int
    num_writes: int
    written: tuple[Took, ...]
    """From the first write to the flush."""
    copied: tuple[Took, ...]
    """Ranges of the same sizes and order copied one by one into private memory of this process. Of another pass: what was just written
    would still be in cache."""
    whole_copied: tuple[Took, ...]
    """As many bytes in one call of memcpy."""


class Digested(msgspec.Struct, frozen=True, tag="digested"):
    hexdigest: str


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    detail: str


Reply = Opened | Joined | Measured | Digested | Problem


def peer_id(name: str) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(1))


class Node:
    """Everything of this process."""

    def __init__(self) -> None:
        self._events: deque[TransportEvent] = deque()
        self._tokens = count(1)
        self._opened: tuple[Transport, memoryview] | None = None
        self._peer: PeerId | None = None
        self._private: list[mmap.mmap] = []

    def do(self, command: Command) -> Reply:
        match command:
            case Open():
                return self._open(command)
            case Join():
                return self._join(command)
            case Measure():
                return self._measure(command)
            case Digest():
                return self._digest(command)

    def turn(self, command_fd: int | None, deadline: float) -> bool:
        """One round of progress, or sleep. True when a command can be read."""
        fds = [] if command_fd is None else [command_fd]
        if self._opened is None:
            return bool(select.select(fds, [], [], max(0.0, deadline - time.monotonic()))[0])
        transport = self._transport
        if transport.progress() or transport.busy() or not transport.arm():
            return bool(fds and select.select(fds, [], [], 0)[0])
        wake = min(deadline, transport.next_deadline() or deadline)
        ready = select.select([*fds, *transport.wait_fds()], [], [], max(0.0, wake - time.monotonic()))[0]
        return command_fd in ready

    def close(self) -> None:
        if self._opened is not None:
            self._transport.close()
            self._opened = None

    # ---- commands

    def _open(self, command: Open) -> Opened:
        if command.core >= 0:
            os.sched_setaffinity(0, {command.core})
        settings = TransportSettings(peer_id(command.name), b"bench", "127.0.0.1", command.host_id, command.lanes)
        transport = transport_factory(command.transport)(settings, self._events.append)
        buffer = transport.allocate_pool(command.pool_nbytes).buffer
        if buffer is None:
            raise TransportError(f"{command.transport} gives no host memory to measure with")
        self._opened = transport, buffer
        memory = np.frombuffer(buffer, np.uint8)
        block = np.random.default_rng(zlib.crc32(command.name.encode())).integers(0, 256, 1 << 20, np.uint8)
        for start in range(0, len(memory), len(block)):
            memory[start : start + len(block)] = block[: len(memory) - start]
            block = np.roll(block, 4097)
        return Opened(transport.export_metadata(), str(getattr(transport, "library", command.transport)))

    def _join(self, command: Join) -> Joined:
        peer = peer_id(command.name)
        self._transport.add_peer(peer, command.metadata)
        event = self._wait_for(lambda event: not isinstance(event, Flushed))
        if not isinstance(event, PeerJoined):
            raise TransportError(f"not joined: {event}")
        self._peer = peer
        everything = np.array([0], np.int64), np.array([len(self._memory)], np.int64)
        self._transport.open_window(WriteWindow(LEASE, EPOCH, peer, *everything))
        while self._transport.progress() or self._transport.busy():
            continue
        return Joined(event.lane, event.one_sided)

    def _measure(self, command: Measure) -> Measured:
        passes = plan_passes(command.case)
        once, piecewise = self._private_memory()
        written: list[Took] = []
        copied: list[Took] = []
        whole: list[Took] = []
        gc.disable()
        for round_index in range(command.rounds + 1):
            batches, others = passes[round_index % len(passes)], passes[(round_index + len(passes) // 2) % len(passes)]
            whole.append(_copy_whole(self._memory, once, num_bytes(batches), round_index))
            written.append(self._write(batches))
            copied.append(_copy_ranges(self._memory, piecewise, others))
        gc.enable()
        num_writes = sum(len(ops) for ops in passes[0])
        return Measured(num_bytes(passes[0]), num_writes, tuple(written[1:]), tuple(copied[1:]), tuple(whole[1:]))

    def _digest(self, command: Digest) -> Digested:
        """The writer writes the pass first."""
        batches = plan_passes(command.case)[0]
        if not command.is_target:
            self._write(batches)
        digest = hashlib.blake2b(digest_size=16)
        for ops in batches:
            for local, remote, nbytes in ops.tolist():
                start = remote if command.is_target else local
                digest.update(self._memory[start : start + nbytes])
        return Digested(digest.hexdigest())

    # ---- inside

    @property
    def _transport(self) -> Transport:
        assert self._opened is not None, "not opened"
        return self._opened[0]

    @property
    def _memory(self) -> memoryview:
        assert self._opened is not None, "not opened"
        return self._opened[1]

    def _write(self, batches: Sequence[Ops]) -> Took:
        """From the first write to the flush. Raises TransportError when the flush fails."""
        transport, peer, token = self._transport, self._peer, next(self._tokens)
        assert peer is not None, "not joined"
        began = _now()
        for ops in batches:
            transport.write(WriteBatch(peer, LEASE, EPOCH, ops))
        transport.flush(peer, token)
        event = self._wait_for(lambda event: True)
        took = _since(began)
        if not isinstance(event, Flushed) or not event.ok:
            raise TransportError(f"the flush failed: {event}")
        return took

    def _wait_for(self, is_wanted: Callable[[TransportEvent], bool]) -> TransportEvent:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            while self._events:
                event = self._events.popleft()
                if is_wanted(event):
                    return event
            if time.monotonic() >= deadline:
                raise TransportError(f"nothing came in {TIMEOUT_S:g} s")
            self.turn(None, deadline)

    def _private_memory(self) -> tuple[memoryview, memoryview]:
        """Two, as large as the pool, every page touched: each way of copying has a target of its own, which stays no longer in cache than
        the pool of the peer does."""
        while len(self._private) < 2:
            memory = mmap.mmap(-1, len(self._memory), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
            self._private.append(memory)
        return memoryview(self._private[0]), memoryview(self._private[1])


def serve() -> None:
    node = Node()
    commands = msgspec.json.Decoder(Command)
    fd = sys.stdin.fileno()
    os.set_blocking(fd, False)
    pending = b""
    while True:
        while b"\n" not in pending:
            if not node.turn(fd, time.monotonic() + 1.0):
                continue
            data = os.read(fd, 1 << 20)
            if not data:
                node.close()
                return
            pending += data
        line, _, pending = pending.partition(b"\n")
        try:
            reply = node.do(commands.decode(line))
        except PdServeError as error:
            reply = Problem(error.message)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


def _copy_whole(source: memoryview, target: memoryview, nbytes: int, turn: int) -> Took:
    start = turn * nbytes % (len(source) - nbytes + 1)
    began = _now()
    target[start : start + nbytes] = source[start : start + nbytes]
    return _since(began)


def _copy_ranges(source: memoryview, target: memoryview, batches: Sequence[Ops]) -> Took:
    ranges = [ops.tolist() for ops in batches]
    began = _now()
    for layer in ranges:
        for local, remote, nbytes in layer:
            target[remote : remote + nbytes] = source[local : local + nbytes]
    return _since(began)


def _now() -> Took:
    return Took(time.perf_counter(), time.thread_time())


def _since(began: Took) -> Took:
    return Took(time.perf_counter() - began.wall_s, time.thread_time() - began.cpu_s)


if __name__ == "__main__":
    serve()
