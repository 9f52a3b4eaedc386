"""A part of `make bench-gpu`: one process's pool in GPU memory into another's, by the transport: cuda_ipc where both are on one host.

With two GPUs each process takes one; with one they share it. Every byte is compared before anything is measured.
"""

from __future__ import annotations

import multiprocessing
import select
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.base import Flushed, PeerJoined, PeerRefused, Transport, TransportEvent, TransportSettings, WriteBatch, WriteWindow
from pd_serve.transport.registry import transport_factory
from tests.bench.gpu_figures import Figure, Task, share

PIECES = (64 << 10, 1 << 20, 16 << 20)
ROUNDS = 5
_LEASE, _EPOCH = LeaseId(1), Epoch(1)
_JOIN_S, _FLUSH_S, _ANSWER_S = 15.0, 20.0, 45.0


def measure_transfer(task: Task) -> list[Figure]:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    nodes = [context.Process(target=_node, args=(index, task, pairs[index][1]), daemon=True) for index in range(2)]
    for node in nodes:
        node.start()
    writer, target = (ours for ours, _ in pairs)
    metadata = [_receive(pipe) for pipe in (writer, target)]
    writer.send(metadata[1])
    target.send(metadata[0])
    lane, rows = _receive(writer)
    writer.send("digest")
    target.send("digest")
    digests = [_receive(pipe) for pipe in (writer, target)]
    for pipe in (writer, target):
        pipe.send("end")
    for node in nodes:
        node.join(5)
    if digests[0] != digests[1]:
        raise RuntimeError(f"over {lane} other bytes arrived than were sent")
    ideal = task.limits.bytes_per_s / 2
    return [
        Figure(f"transfer {nbytes >> 10} KiB over {lane}", speed / 1e9, "GB/s", share(speed, ideal) if ideal else None, "a copy in memory")
        for nbytes, speed in rows
    ]


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_ANSWER_S):
        raise RuntimeError("a process of the transfer does not answer")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _node(index: int, task: Task, pipe: Connection) -> None:
    try:
        _serve(index, task, pipe)
    except Exception as error:  # noqa: BLE001 - root of a process: told to the one that waits for it
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def _serve(index: int, task: Task, pipe: Connection) -> None:
    device = torch.device(f"cuda:{index % torch.cuda.device_count()}" if task.device == "cuda" else "cpu")
    nbytes = PIECES[-1] * (1 if task.is_rehearsal else 8)
    pool = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if index == 0:
        pool.copy_(torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    me, other = (PeerId(WorkerId(f"node-{number}"), Incarnation(1)) for number in (index, 1 - index))
    events: list[TransportEvent] = []
    transport = transport_factory("ucx")(TransportSettings(me, b"", "127.0.0.1", "this-host", join_timeout_s=_JOIN_S), events.append)
    transport.register_pool(pool.data_ptr(), nbytes, str(device))
    pipe.send(transport.export_metadata())
    transport.add_peer(other, _wait_for_message(transport, pipe))
    if index == 1:
        whole = np.array([0], np.int64), np.array([nbytes], np.int64)
        transport.open_window(WriteWindow(_LEASE, _EPOCH, other, *whole))
    joined = _until(transport, events, _JOIN_S, lambda event: isinstance(event, PeerJoined | PeerRefused))
    if not isinstance(joined, PeerJoined):
        raise RuntimeError(f"the peers did not join: {joined}")
    if index == 0:
        pipe.send((joined.lane, [(piece, _speed(transport, events, other, nbytes, piece)) for piece in PIECES]))
    while (asked := _wait_for_message(transport, pipe)) != "end":
        assert asked == "digest"
        pipe.send(int(pool.view(torch.int64).sum()))
    transport.close()


def _speed(transport: Transport, events: list[TransportEvent], peer: PeerId, nbytes: int, piece: int) -> float:
    """Bytes per second of the whole pool in writes of `piece`, the median of rounds behind one that does not count."""
    starts = np.arange(0, nbytes, piece, dtype=np.int64)
    ops = np.stack((starts, starts, np.full_like(starts, piece)), axis=1)
    spent = []
    for token in range(ROUNDS + 1):
        events.clear()
        started = time.monotonic()
        transport.write(WriteBatch(peer, _LEASE, _EPOCH, ops))
        transport.flush(peer, token)
        flushed = _until(transport, events, _FLUSH_S, lambda event: isinstance(event, Flushed))
        if not isinstance(flushed, Flushed) or not flushed.ok:
            raise RuntimeError(f"not delivered: {flushed}")
        spent.append(time.monotonic() - started)
    return nbytes / statistics.median(spent[1:])


def _until(transport: Transport, events: list[TransportEvent], timeout_s: float, is_it: object) -> TransportEvent:
    """Drives the transport without pause until an event is there."""
    assert callable(is_it)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        transport.progress()
        found = next((event for event in events if is_it(event)), None)
        if found is not None:
            return found
    raise RuntimeError(f"nothing within {timeout_s:g} s; last {events[-1:]}")


def _wait_for_message(transport: Transport, pipe: Connection) -> Any:
    """Drives the transport meanwhile: its peer may need it to."""
    deadline = time.monotonic() + _ANSWER_S + 60
    while not pipe.poll():
        if time.monotonic() > deadline:
            raise RuntimeError("no further word")
        if not transport.progress() and transport.arm():
            select.select([pipe.fileno(), *transport.wait_fds()], [], [], 0.2)
    return pipe.recv()
