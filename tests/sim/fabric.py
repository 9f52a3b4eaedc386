"""The fake transport between workers: what transport/base.py promises, at its worst.

Lanes, drawn per pair of processes:
  CHECKED  writes are messages that the target's transport thread admits by window; a lost peer is fenced
  SHM      writes land in the target's memory whatever the target does, also while it is stopped; only the writer's death fences
  RDMA     as SHM, and writes land late and out of order, even after the loss was reported; the target can revoke, which takes a while
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from pd_serve.ids import Epoch, LeaseId, PeerId
from pd_serve.protocol.notify import Completed, NoticeUnion
from pd_serve.transport.base import PeerFenced, PeerJoined, PeerLost, PeerRefused
from tests.sim.core import Channel, Loop

if TYPE_CHECKING:
    from tests.sim.node import Node


class Lane(Enum):
    CHECKED = auto()
    SHM = auto()
    RDMA = auto()


@dataclass(slots=True)
class Write:
    """One coalesced range on its way."""

    lease_id: LeaseId
    epoch: Epoch
    source: int
    target: int
    nbytes: int
    snapshot: bytes
    """What the source held when the write was issued, for writes that outlive their process."""


@dataclass(slots=True, eq=False)
class Side:
    """One process's end of a connection."""

    node: Node
    is_joined: bool = False
    is_lost: bool = False
    """The process knows that the connection is gone."""
    in_flight: set[int] = field(default_factory=set)
    """Writes issued by this side that have not landed."""
    flushes: list[tuple[set[int], Callable[[bool, str], None]]] = field(default_factory=list)
    """(writes waited for, how to end it)"""
    num_issued: int = 0
    is_revoked: bool = False
    """No write of this side lands any more."""
    incoming: Channel | None = None


@dataclass(eq=False)
class Connection:
    lane: Lane
    sides: dict[PeerId, Side]
    is_alive: bool = True

    def other(self, peer: PeerId) -> Side:
        return next(side for name, side in self.sides.items() if name != peer)


@dataclass(frozen=True, slots=True)
class FabricFaults:
    notice_loss: float = 0.0
    notice_duplicate: float = 0.0
    notice_forgery: float = 0.0
    """Chance that a record is followed by one that names another live lease of the same writer under the wrong epoch."""
    write_duplicate: float = 0.0
    """Chance that a checked write comes again, later."""
    spike: tuple[float, float] = (0.0, 0.0)


class Fabric:
    def __init__(self, loop: Loop, faults: FabricFaults, lanes: tuple[Lane, ...]) -> None:
        self.loop = loop
        self.faults = faults
        self._lanes = lanes
        self._nodes: dict[PeerId, Node] = {}
        self._ends: dict[tuple[PeerId, PeerId], Connection] = {}
        """(who, whom): the connection as `who` knows it, until `who` removes it."""
        self._wants: dict[tuple[PeerId, PeerId], int] = {}
        """(who, whom) is joining, since which attempt."""
        self._dead_watch: list[tuple[PeerId, Node]] = []
        """(dead or unfenced writer, who waits to hear that it is fenced)"""
        self._attempts = 0

    def register(self, node: Node) -> None:
        self._nodes[node.peer] = node

    def connection(self, who: PeerId, whom: PeerId) -> Connection | None:
        return self._ends.get((who, whom))

    def connections(self) -> list[Connection]:
        return [connection for (who, whom), connection in self._ends.items() if connection.is_alive and who < whom]

    # ---- joining

    def add_peer(self, node: Node, peer: PeerId) -> None:
        if (node.peer, peer) in self._wants or self.connection(node.peer, peer) is not None:
            return
        self._attempts += 1
        attempt = self._attempts
        self._wants[node.peer, peer] = attempt
        self.loop.after(0.5, lambda: node.call(lambda: self._give_up_join(node, peer, attempt)))
        if (peer, node.peer) in self._wants and peer in self._nodes and not self._nodes[peer].is_dead:
            self._connect(node, self._nodes[peer])

    def _give_up_join(self, node: Node, peer: PeerId, attempt: int) -> None:
        if self._wants.get((node.peer, peer)) == attempt:
            del self._wants[node.peer, peer]
            node.report(PeerRefused(peer, "no answer"))

    def _connect(self, a: Node, b: Node) -> None:
        del self._wants[a.peer, b.peer], self._wants[b.peer, a.peer]
        lane = self.loop.rng.choice(self._lanes)
        connection = Connection(lane, {a.peer: Side(a), b.peer: Side(b)})
        self._ends[a.peer, b.peer] = self._ends[b.peer, a.peer] = connection
        for side, peer in ((connection.sides[a.peer], b.peer), (connection.sides[b.peer], a.peer)):
            side.incoming = Channel(side.node, (0.00005, 0.0005), self.faults.spike)
            self.loop.after(self.loop.rng.uniform(0.0001, 0.005), self._joiner(connection, side, peer))

    def _joiner(self, connection: Connection, side: Side, peer: PeerId) -> Callable[[], None]:
        def joined() -> None:
            if connection.is_alive:
                side.is_joined = True
                side.node.report(PeerJoined(peer, connection.lane.name, connection.lane is not Lane.CHECKED, 1e9, 1e-5))

        return lambda: side.node.call(joined)

    def remove_peer(self, node: Node, peer: PeerId) -> None:
        self._wants.pop((node.peer, peer), None)
        self._dead_watch = [entry for entry in self._dead_watch if entry != (peer, node)]
        connection = self._ends.pop((node.peer, peer), None)
        if connection is None:
            return
        mine = connection.sides[node.peer]
        mine.is_lost = True
        self._fail_flushes(mine, "peer removed")
        if connection.lane is not Lane.RDMA:
            mine.is_revoked = True
        if connection.is_alive:
            connection.is_alive = False
            self._tell_lost(connection, connection.other(node.peer), node.peer, "peer closed")

    # ---- loss

    def cut(self, connection: Connection) -> None:
        """The connection fails; both ends find out in their own time."""
        if not connection.is_alive:
            return
        connection.is_alive = False
        for peer, side in connection.sides.items():
            self._tell_lost(connection, side, connection.other(peer).node.peer, "cut")

    def on_death(self, node: Node) -> None:
        for key in [key for key in self._wants if key[0] == node.peer]:
            del self._wants[key]
        for (who, _), connection in list(self._ends.items()):
            if who == node.peer and connection.is_alive:
                connection.is_alive = False
                self._tell_lost(connection, connection.other(node.peer), node.peer, "died")
        for writer, waiting in list(self._dead_watch):
            if writer == node.peer:
                self._dead_watch.remove((writer, waiting))
                self._fence_when_landed(node.peer, waiting)

    def _tell_lost(self, connection: Connection, side: Side, peer: PeerId, detail: str) -> None:
        def lost() -> None:
            if side.is_lost:
                return
            side.is_lost = True
            self._wants.pop((side.node.peer, peer), None)
            self._fail_flushes(side, detail)
            if not side.is_joined:
                side.node.report(PeerRefused(peer, detail))
                return
            other = connection.sides[peer]
            if connection.lane is Lane.CHECKED:
                other.is_revoked = True
            is_fenced = other.is_revoked or (other.node.is_dead and not other.in_flight)
            side.node.report(PeerLost(peer, detail, is_fenced))
            if is_fenced:
                return
            if other.node.is_dead:
                self._fence_when_landed(peer, side.node)
            elif connection.lane is Lane.RDMA:
                self.loop.after(self.loop.rng.uniform(0.0, 0.2), lambda: side.node.call(lambda: self._revoke(connection, side, peer)))
            else:
                self._dead_watch.append((peer, side.node))

        self.loop.after(self.loop.rng.uniform(0.0002, 0.3), lambda: side.node.call(lost))

    def _revoke(self, connection: Connection, side: Side, peer: PeerId) -> None:
        if self.connection(side.node.peer, peer) is connection:
            connection.sides[peer].is_revoked = True
            side.node.report(PeerFenced(peer))

    def _fence_when_landed(self, writer: PeerId, waiting: Node) -> None:
        def check() -> None:
            connection = self.connection(waiting.peer, writer)
            if connection is None:
                return
            if connection.sides[writer].in_flight:
                self.loop.after(0.001, check)
                return
            waiting.call(lambda: waiting.report(PeerFenced(writer)))

        self.loop.after(self.loop.rng.uniform(0.0, 0.01), check)

    def hard_fence(self, node: Node, peer: PeerId) -> None:
        """SHM: end the process. RDMA: revoke. CHECKED: nothing is left to stop."""
        connection = self.connection(node.peer, peer)
        if connection is not None and connection.lane is Lane.SHM:
            self._nodes[peer].crash()
        elif connection is not None and connection.lane is Lane.RDMA and connection.is_alive:
            self.cut(connection)

    # ---- data

    def write(self, node: Node, peer: PeerId, writes: list[Write]) -> None:
        connection = self.connection(node.peer, peer)
        if connection is None or not connection.sides[node.peer].is_joined or connection.sides[node.peer].is_lost:
            return
        mine, target = connection.sides[node.peer], connection.other(node.peer)
        for write in writes:
            mine.num_issued += 1
            mine.in_flight.add(mine.num_issued)
            landing = self._landing(mine, target, write, mine.num_issued)
            if connection.lane is Lane.SHM:
                landing()
            elif connection.lane is Lane.RDMA:
                delay = self.loop.rng.uniform(0.00005, 0.002)
                if self.loop.rng.random() < 0.02:
                    delay += self.loop.rng.uniform(0.0, 0.3)
                self.loop.after(delay, landing)
            elif connection.is_alive:
                assert target.incoming is not None
                target.incoming.send(self._admission(mine, target, write, mine.num_issued))
                if self.loop.rng.random() < self.faults.write_duplicate:
                    self.loop.after(self.loop.rng.uniform(0.0005, 0.01), self._repetition(mine, target, write))

    def _landing(self, mine: Side, target: Side, write: Write, number: int) -> Callable[[], None]:
        """A one-sided write reaches the target's memory, or nothing if it was revoked or the target's memory is gone."""

        def land() -> None:
            if not mine.is_revoked and not target.node.is_dead:
                is_on_the_wire = mine.node.is_dead or mine.is_lost
                data = write.snapshot if is_on_the_wire else mine.node.read_source(write)
                target.node.memory_written(mine.node.peer, write, data)
            self._landed(mine, number)

        return land

    def _admission(self, mine: Side, target: Side, write: Write, number: int) -> Callable[[], None]:
        """The same bytes as a message that the target's transport thread lets in or drops."""

        def admit() -> None:
            if not target.is_lost:
                target.node.admit_checked(mine.node.peer, write, write.snapshot)
                self.loop.after(self.loop.rng.uniform(0.00005, 0.0005), lambda: self._landed(mine, number))

        return admit

    def _repetition(self, mine: Side, target: Side, write: Write) -> Callable[[], None]:
        def admit() -> None:
            if not target.is_lost:
                target.node.admit_checked(mine.node.peer, write, write.snapshot)

        return lambda: target.node.call(admit)

    def _landed(self, mine: Side, number: int) -> None:
        mine.in_flight.discard(number)
        if mine.node.is_dead or mine.is_lost:
            return
        for flush in list(mine.flushes):
            flush[0].discard(number)
            if not flush[0]:
                mine.flushes.remove(flush)
                self._end_flush(mine, flush[1])

    def flush(self, node: Node, peer: PeerId, end: Callable[[bool, str], None]) -> None:
        """`end` is called exactly once unless the process dies."""
        connection = self.connection(node.peer, peer)
        mine = connection.sides[node.peer] if connection else None
        if mine is None or not mine.is_joined or mine.is_lost:
            node.call(lambda: end(False, "peer unknown or lost"))
        elif not mine.in_flight:
            self._end_flush(mine, end)
        else:
            mine.flushes.append((set(mine.in_flight), end))

    def _end_flush(self, mine: Side, end: Callable[[bool, str], None]) -> None:
        mine.node.call(lambda: end(not mine.is_lost, "lost" if mine.is_lost else ""))

    def _fail_flushes(self, side: Side, detail: str) -> None:
        flushes, side.flushes = side.flushes, []
        for _, end in flushes:
            end(False, detail)

    # ---- records

    def notify(self, node: Node, peer: PeerId, notice: NoticeUnion) -> None:
        connection = self.connection(node.peer, peer)
        if connection is None or not connection.is_alive or connection.sides[node.peer].is_lost:
            return
        target = connection.other(node.peer)
        rng = self.loop.rng
        copies = 0 if rng.random() < self.faults.notice_loss else 2 if rng.random() < self.faults.notice_duplicate else 1

        def deliver() -> None:
            if target.is_joined and not target.is_lost:
                target.node.notice_arrived(node.peer, notice)

        assert target.incoming is not None
        for _ in range(copies):
            target.incoming.send(deliver)
        if rng.random() < self.faults.notice_forgery:
            target.incoming.send(lambda: self._forge(node, target, notice))

    def _forge(self, node: Node, target: Side, notice: NoticeUnion) -> None:
        """A completion that would fill a lease too early, if identity were not checked."""
        layout = target.node.info.layout
        for lease in target.node.machine.leases:
            if lease.writer != node.peer or not target.is_joined or target.is_lost or lease.epoch == notice.epoch:
                continue
            num_tokens = len(target.node.prompt_of(lease.attempt_id))
            num_cached = lease.num_cached_blocks * layout.block_size
            forged = Completed(
                lease_id=lease.lease_id,
                epoch=notice.epoch,
                attempt_id=lease.attempt_id,
                contributor=0,
                num_contributors=1,
                first_token=1,
                logprobs=None,
                num_tokens=num_tokens,
                num_layers=layout.num_layers,
                nbytes=(num_tokens - num_cached) * layout.bytes_per_token,
                num_cached_tokens=0,
                compute_to_notice_s=0.0,
            )
            target.node.notice_arrived(node.peer, forged)
