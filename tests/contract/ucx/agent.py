"""A process with one ucx transport that does what it is told: one JSON command per line on stdin, one JSON answer per line on stdout.

Between commands it drives the transport as a worker's transport thread does: progress while busy, else arm and sleep on the descriptors.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.base import Flushed, TransportEvent, TransportSettings, WriteBatch, WriteWindow
from pd_serve.transport.ucx import joining, libucp
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.transport import UcxTransport

Json = object


class Deaf:
    """A UCX worker that makes no progress."""

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> object:
        return getattr(self._worker, name)

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True


def peer_of(value: list[object]) -> PeerId:
    return PeerId(WorkerId(str(value[0])), Incarnation(int(str(value[1]))))


@dataclass
class Stream:
    """Endless writes of one size, with a flush behind each round of 32."""

    peer: PeerId
    nbytes: int
    lease: int
    num_ok: int = 0
    num_failed: int = 0
    is_flushing: bool = False
    next_token: int = 1_000_000


@dataclass
class Agent:
    transport: UcxTransport | None = None
    memory: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    events: list[TransportEvent] = field(default_factory=list)
    stream: Stream | None = None

    def on_event(self, event: TransportEvent) -> None:
        stream = self.stream
        if stream is not None and isinstance(event, Flushed) and event.token >= 1_000_000:
            stream.is_flushing = False
            stream.num_ok += event.ok
            stream.num_failed += not event.ok
            return
        self.events.append(event)

    @property
    def up(self) -> UcxTransport:
        assert self.transport is not None
        return self.transport

    # ---- commands

    def do_open(
        self,
        peer: list[object],
        secret: str,
        lanes: str,
        nbytes: int,
        host: str = "127.0.0.1/here",
        join_timeout_s: float = 5.0,
        settle_s: float = 2.2,
    ) -> Json:
        """`host`: address/host id. `settle_s`: how long a second join with a process has to live."""
        joining.SETTLE_S = settle_s
        host, _, host_id = host.partition("/")
        settings = TransportSettings(
            peer_of(peer), secret.encode(), host, host_id, lanes, join_timeout_s=join_timeout_s, probe_nbytes=1 << 16
        )
        self.events.clear()
        self.stream = None
        self.transport = UcxTransport(settings, self.on_event)
        region = self.transport.allocate_pool(nbytes)
        assert region.buffer is not None
        self.memory = np.frombuffer(region.buffer, np.uint8)
        return {"metadata": base64.b64encode(self.transport.export_metadata()).decode(), "address": region.address}

    def do_add(self, peer: list[object], metadata: str) -> None:
        self.up.add_peer(peer_of(peer), base64.b64decode(metadata))

    def do_remove(self, peer: list[object]) -> None:
        self.up.remove_peer(peer_of(peer))

    def do_window(self, writer: list[object], start: int, end: int, lease: int, epoch: int) -> None:
        self.up.open_window(WriteWindow(LeaseId(lease), Epoch(epoch), peer_of(writer), np.array([start]), np.array([end])))

    def do_close_window(self, lease: int) -> Json:
        return self.up.close_window(LeaseId(lease))

    def do_write(self, peer: list[object], rows: list[list[int]], lease: int, epoch: int) -> None:
        self.up.write(WriteBatch(peer_of(peer), LeaseId(lease), Epoch(epoch), np.array(rows, np.int64)))

    def do_flush(self, peer: list[object], token: int) -> None:
        self.up.flush(peer_of(peer), token)

    def do_stand_still_and_write(self, seconds: float, peer: list[object], rows: list[list[int]], token: int) -> None:
        """Under lease 1, with a flush behind; no step between: what happens meanwhile is not noticed before both were asked for."""
        self.do_stand_still(seconds)
        self.do_write(peer, rows, 1, 1)
        self.do_flush(peer, token)

    def do_notify(self, peer: list[object], text: str) -> None:
        self.up.notify(peer_of(peer), text.encode())

    def do_fence(self, peer: list[object]) -> Json:
        return self.up.hard_fence(peer_of(peer))

    def do_fill(self, value: int) -> None:
        self.memory[:] = value

    def do_pattern(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(1, 256, len(self.memory), np.uint8)

    def do_digest(self, start: int, end: int) -> Json:
        import hashlib

        return hashlib.sha256(self.memory[start:end].tobytes()).hexdigest()

    def do_count(self, value: int) -> Json:
        return int(np.count_nonzero(self.memory == value))

    def do_deafen(self) -> None:
        """Never look at the queue of messages over shared memory again: as if a sender had been killed while it filled the next place."""
        ports = self.up._node.ports
        for lane in [lane for lane in ports.lanes if lane is Lane.SHM]:
            ports[lane].worker = Deaf(ports[lane].worker)  # type: ignore[assignment]

    def do_tensor(self) -> Json:
        """The pool as a tensor shares its memory: what torch writes is what peers see and the reverse."""
        import torch

        tensor = torch.frombuffer(memoryview(self.memory), dtype=torch.bfloat16)
        before = float(tensor[:64].float().sum())
        tensor[64:128] = 1.0
        return {"sum": before, "one": self.memory[128:130].tolist(), "numel": tensor.numel()}

    def do_stream(self, peer: list[object], nbytes: int, lease: int) -> None:
        self.stream = Stream(peer_of(peer), nbytes, lease)

    def do_stream_state(self) -> Json:
        assert self.stream is not None
        return {"ok": self.stream.num_ok, "failed": self.stream.num_failed}

    def do_stop_stream(self) -> None:
        self.stream = None

    def do_stand_still(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_events(self) -> Json:
        """All events since the last call: [[kind, fields], ...]."""
        taken, self.events = self.events, []
        return [[type(event).__name__, msgspec.to_builtins(event)] for event in taken]

    def do_wait(self, kind: str, timeout: float) -> Json:
        """Progress until an event of that kind has come, take it and leave the others. None when none came in time."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.events:
                if type(event).__name__ == kind:
                    self.events.remove(event)
                    return msgspec.to_builtins(event)
            if time.monotonic() >= deadline:
                return None
            self.turn(deadline)

    def do_run(self, seconds: float) -> Json:
        """Progress that long; answers the processor seconds it took."""
        before = time.process_time()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.turn(deadline)
        return time.process_time() - before

    def do_resources(self) -> Json:
        with open("/proc/self/statm", encoding="ascii") as statm:
            rss = int(statm.read().split()[1]) * 4096
        counters = msgspec.to_builtins(self.up.counters())
        return {"fds": len(os.listdir("/proc/self/fd")), "rss": rss, **counters, **handles()}

    def do_close(self) -> None:
        self.memory = np.empty(0, np.uint8)
        self.up.close()
        self.transport = None

    # ---- driving

    def turn(self, deadline: float, command_fd: int | None = None) -> bool:
        """One round of progress or sleep. True when a command is waiting."""
        transport = self.transport
        fds = [] if command_fd is None else [command_fd]
        if transport is None:
            return bool(select.select(fds, [], [], max(0.0, deadline - time.monotonic()))[0])
        self.step_stream()
        if transport.progress() or transport.busy() or not transport.arm():
            return bool(select.select(fds, [], [], 0)[0])
        wake = min(deadline, transport.next_deadline() or deadline)
        if self.stream is not None and not self.stream.is_flushing:
            wake = min(wake, time.monotonic())
        ready = select.select([*fds, *transport.wait_fds()], [], [], max(0.0, wake - time.monotonic()))[0]
        return command_fd in ready

    def step_stream(self) -> None:
        stream = self.stream
        if stream is None or stream.is_flushing:
            return
        count = min(32, len(self.memory) // stream.nbytes)
        rows = np.array([[index * stream.nbytes, index * stream.nbytes, stream.nbytes] for index in range(count)], np.int64)
        self.up.write(WriteBatch(stream.peer, LeaseId(stream.lease), Epoch(1), rows))
        stream.is_flushing = True
        stream.next_token += 1
        self.up.flush(stream.peer, stream.next_token)

    def serve(self) -> None:
        commands = sys.stdin.buffer
        fd = commands.fileno()
        os.set_blocking(fd, False)
        pending = b""
        while True:
            while b"\n" not in pending:
                if not self.turn(time.monotonic() + 1.0, fd):
                    continue
                data = commands.read1(1 << 20)
                if not data:
                    return
                pending += data
            line, _, pending = pending.partition(b"\n")
            command = json.loads(line)
            action: Callable[..., Json] = getattr(self, "do_" + command.pop("op"))
            answer = action(**command)
            sys.stdout.write(json.dumps({"answer": answer}) + "\n")
            sys.stdout.flush()


def handles() -> dict[str, int]:
    """What UCX holds for this process: objects of the binding by kind, garbage not counted, and shared memory mapped from anywhere."""
    gc.collect()
    kinds = Counter(type(item).__name__.removeprefix("Libucp") for item in gc.get_objects() if type(item).__module__ == libucp.__name__)
    with open("/proc/self/maps", encoding="ascii") as maps:
        num_maps = sum("ucx_shm" in line for line in maps)
    return {
        "endpoints": kinds["Endpoint"],
        "keys": kinds["Key"],
        "memories": kinds["Memory"],
        "requests": kinds["Request"],
        "maps": num_maps,
    }


if __name__ == "__main__":
    Agent().serve()
