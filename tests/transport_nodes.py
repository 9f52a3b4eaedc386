"""Builders for transport tests: nodes (a transport with its pool and events) that are driven on one thread, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pd_serve.ids import Epoch, Incarnation, LeaseId, PeerId, WorkerId
from pd_serve.transport.base import (
    Flushed,
    NoticeReceived,
    PeerFenced,
    PeerJoined,
    PeerLost,
    PeerRefused,
    Region,
    Transport,
    TransportEvent,
    TransportSettings,
    WriteBatch,
    WriteWindow,
)
from pd_serve.transport.registry import TransportFactory
from tests.patience import PATIENCE_S

POOL_NBYTES = 1 << 20
LEASE = LeaseId(7)
EPOCH = Epoch(99)
SECRET = b"the cluster's secret"


def peer_id(name: str, incarnation: int = 1) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(incarnation))


def settings_for(peer: PeerId, lanes: str, secret: bytes = SECRET, join_timeout_s: float = 5.0) -> TransportSettings:
    return TransportSettings(peer, secret, "127.0.0.1", "this-host", lanes, join_timeout_s=join_timeout_s, probe_nbytes=1 << 16)


def ops(*rows: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, 3)


def pattern(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    """Bytes that are never zero, so that a fresh pool holds none of them."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


@dataclass
class Node:
    """One transport, its pool as an array and everything it reported."""

    peer: PeerId
    transport: Transport
    events: list[TransportEvent]
    watchers: list[Callable[[TransportEvent], None]]
    """Called with each event at the moment it is reported."""
    region: Region
    metadata: bytes
    memory: NDArray[np.uint8]
    next_token: int = 1

    def of(self, kind: type) -> list[TransportEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def notices(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, NoticeReceived)]

    def flushed(self, token: int) -> Flushed | None:
        return next((event for event in self.events if isinstance(event, Flushed) and event.token == token), None)

    def has_joined(self, peer: PeerId) -> bool:
        return any(isinstance(event, PeerJoined) and event.peer == peer for event in self.events)

    def has_ended(self, peer: PeerId) -> bool:
        return any(isinstance(event, PeerLost | PeerRefused | PeerFenced) and event.peer == peer for event in self.events)

    def flush(self, peer: PeerId) -> int:
        token = self.next_token
        self.next_token += 1
        self.transport.flush(peer, token)
        return token

    def write(self, peer: PeerId, rows: NDArray[np.int64], lease: LeaseId = LEASE, epoch: Epoch = EPOCH) -> None:
        self.transport.write(WriteBatch(peer, lease, epoch, rows))

    def open_window(
        self,
        writer: PeerId,
        start: int = 0,
        end: int = POOL_NBYTES,
        lease: LeaseId = LEASE,
        epoch: Epoch = EPOCH,
        other_writers: tuple[PeerId, ...] = (),
    ) -> None:
        starts, ends = np.array([start], np.int64), np.array([end], np.int64)
        self.transport.open_window(WriteWindow(lease, epoch, writer, starts, ends, other_writers))


@dataclass
class Nodes:
    """Makes nodes of one implementation and drives them."""

    factory: TransportFactory
    lanes: str
    one_sided: bool
    made: list[Node] = field(default_factory=list)

    def make(self, peer: PeerId, pool_nbytes: int = POOL_NBYTES, secret: bytes = SECRET, join_timeout_s: float = 5.0) -> Node:
        events: list[TransportEvent] = []
        watchers: list[Callable[[TransportEvent], None]] = []

        def sink(event: TransportEvent) -> None:
            events.append(event)
            for watcher in watchers:
                watcher(event)

        transport = self.factory(settings_for(peer, self.lanes, secret, join_timeout_s), sink)
        region = transport.allocate_pool(pool_nbytes)
        assert region.buffer is not None
        memory = np.frombuffer(region.buffer, np.uint8)
        node = Node(peer, transport, events, watchers, region, transport.export_metadata(), memory)
        self.made.append(node)
        return node

    def joined(self, *names: str, pool_nbytes: int = POOL_NBYTES) -> list[Node]:
        """Nodes that have all joined each other; pools of the first hold a pattern."""
        nodes = [self.make(peer_id(name), pool_nbytes) for name in names]
        nodes[0].memory[:] = pattern(pool_nbytes)
        self.join(nodes)
        return nodes

    def join(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.transport.add_peer(other.peer, other.metadata)
        pairs = [(node, other.peer) for node in nodes for other in nodes if other is not node]
        self.pump(lambda: all(node.has_joined(peer) for node, peer in pairs), "everybody joins", nodes)

    def join_at_last(self, one: Node, other: Node) -> None:
        """As their owners do: whoever was refused or lost is added again, until each has joined the other. A machine may stand still longer
        than a short join lasts.
        """
        sides = ((one, other), (other, one))
        num_ended = {node.peer: -1 for node in (one, other)}

        def both_have_joined() -> bool:
            for node, their in sides:
                ended = sum(isinstance(event, PeerLost | PeerRefused) and event.peer == their.peer for event in node.events)
                if ended > num_ended[node.peer]:
                    num_ended[node.peer] = ended
                    node.transport.add_peer(their.peer, their.metadata)
            return all(node.has_joined(their.peer) for node, their in sides)

        self.pump(both_have_joined, f"{one.peer} and {other.peer} join", [one, other])

    def pump(self, until: Callable[[], bool], what: str, nodes: Sequence[Node] | None = None, timeout_s: float = PATIENCE_S) -> None:
        """Progress the nodes in turn until the condition holds; AssertionError naming `what` if it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not until():
            for node in self.made if nodes is None else nodes:
                node.transport.progress()
            if time.monotonic() > deadline:
                events = {str(node.peer): node.events[-5:] for node in self.made}
                raise AssertionError(f"not within {timeout_s} s: {what}; last events {events}")

    def pump_for(self, seconds: float, nodes: Sequence[Node] | None = None) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for node in self.made if nodes is None else nodes:
                node.transport.progress()

    def flush(self, node: Node, peer: PeerId, nodes: Sequence[Node] | None = None) -> Flushed:
        """Flush and wait for the answer."""
        token = node.flush(peer)
        self.pump(lambda: node.flushed(token) is not None, f"flush {token} of {node.peer} ends", nodes)
        flushed = node.flushed(token)
        assert flushed is not None
        return flushed

    def close(self) -> None:
        # Farewells are heard while the others still take steps: a close that waits for a peer of the same thread would wait in vain.
        for node in self.made:
            for other in self.made:
                if other is not node:
                    node.transport.remove_peer(other.peer)
        self.pump_for(0.02)
        for node in self.made:
            node.transport.close()
