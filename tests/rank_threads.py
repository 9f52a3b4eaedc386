"""Builders for tests of the transport thread: real threads over transports of one process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pd_serve.ids import AttemptId, Epoch, LeaseId
from pd_serve.protocol.link import Lease
from pd_serve.protocol.notify import Completed
from pd_serve.transport.base import PeerJoined, WriteWindow
from pd_serve.transport.registry import TransportFactory
from tests.patience import PATIENCE_S, idle_share
from tests.transport_nodes import POOL_NBYTES, ops, pattern, peer_id, settings_for
from workers.events import AddPeer, FlushDone, FlushThenNotify, OpenWindow, PushPlan, TransportReported, WindowOpened
from workers.transport_commands import AllocatePool, TransportOutput, TransportReady
from workers.transport_thread import TransportThread

NUM_LAYERS = 4
STRIDE = POOL_NBYTES // NUM_LAYERS
CHUNK = 8192
STOP_S = 20.0
"""For TransportThread.stop: half of it for what is outstanding."""
T = TypeVar("T")


class Rank:
    """One thread under test and the queue it posts to."""

    def __init__(self, name: str, factory: TransportFactory, lanes: str, num_traces: int = 16) -> None:
        self.peer = peer_id(name)
        self.outputs: queue.Queue[TransportOutput] = queue.Queue()
        self.seen: list[TransportOutput] = []
        self.thread = TransportThread(factory, settings_for(self.peer, lanes), self.outputs.put, num_traces=num_traces)
        self.ready: TransportReady = self.thread.start(AllocatePool(POOL_NBYTES), PATIENCE_S)
        assert self.ready.region.buffer is not None
        self.memory = np.frombuffer(self.ready.region.buffer, np.uint8)

    def expect(self, kind: type[T], accept: Callable[[T], bool] = lambda _: True, timeout_s: float = PATIENCE_S) -> T:
        """The next output of that kind that is accepted; the others are kept in `seen`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                output = self.outputs.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} within {timeout_s} s; seen {self.seen[-5:]}") from None
            self.seen.append(output)
            if isinstance(output, kind) and accept(output):
                return output

    def pending(self) -> list[TransportOutput]:
        outputs = []
        while not self.outputs.empty():
            outputs.append(self.outputs.get())
        self.seen += outputs
        return outputs

    def join(self, other: Rank) -> None:
        self.thread.submit(AddPeer(other.peer, (other.ready.metadata,)))


class Pair:
    def __init__(self, source: Rank, target: Rank) -> None:
        self.source = source
        self.target = target
        source.memory[:] = pattern(POOL_NBYTES)
        source.join(target)
        target.join(source)
        for rank in (source, target):
            rank.expect(TransportReported, lambda output: isinstance(output.event, PeerJoined))

    def lease(self, lease_id: int = 1) -> Lease:
        return Lease(LeaseId(lease_id), Epoch(5), self.target.peer)

    def open(self, lease_id: int = 1) -> None:
        window = WriteWindow(LeaseId(lease_id), Epoch(5), self.source.peer, np.array([0]), np.array([POOL_NBYTES]))
        self.target.thread.submit(OpenWindow(window))
        self.target.expect(WindowOpened, lambda output: output.lease_id == lease_id)

    def plan(self, lease_id: int = 1, at: int = 0) -> PushPlan:
        return PushPlan(AttemptId(lease_id), self.lease(lease_id), ops((at, at, CHUNK)), STRIDE, STRIDE, NUM_LAYERS, 0)

    def completed(self, plan: PushPlan) -> Completed:
        return Completed(plan.lease.lease_id, plan.lease.epoch, plan.attempt_id, 0, 1, 11, None, 32, NUM_LAYERS, plan.nbytes, 0, 0.0)

    def finish(self, plan: PushPlan, token: int = 1, compute_ended_at: float | None = None) -> FlushDone:
        ended_at = time.monotonic() if compute_ended_at is None else compute_ended_at
        self.source.thread.submit(FlushThenNotify(self.target.peer, token, self.completed(plan), ended_at))
        return self.source.expect(FlushDone, lambda output: output.token == token)

    def landed(self, at: int = 0) -> list[bool]:
        return [
            bool(np.array_equal(self.source.memory[at + layer * STRIDE :][:CHUNK], self.target.memory[at + layer * STRIDE :][:CHUNK]))
            for layer in range(NUM_LAYERS)
        ]


def is_idle(share: float, num_windows: int = 8, window_s: float = 0.4) -> bool:
    """Whether this process uses less than that share of a core in one of some windows of sleep: others may hold a garbage collection."""
    share = idle_share(share)
    for _ in range(num_windows):
        started, before = time.monotonic(), time.process_time()
        time.sleep(window_s)
        if time.process_time() - before < share * (time.monotonic() - started):
            return True
    return False
