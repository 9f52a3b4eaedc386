"""The `ucx` transport: KV bytes between workers over UCX. Runs on the transport thread, which makes every call.

    transport.py    the Transport interface, events, sleeping         joining.py (handshake.py)  bringing peers in
    peer.py         one peer; what the parts share                    departures.py              letting go of them
    sessions.py     joined peers, their loss
    one_sided.py    puts into shared memory or over RDMA              fences.py (process.py)     who can still write here
    checked.py      the same bytes as checked messages                inbox.py (windows.py)      what arrives
    seam.py         the calls of UCX; libucp.py, ucxpy.py make them   ports.py, lanes.py, pool.py   contexts, lanes, memory

What must stay true: no call blocks inside the library (no worker fence, no graceful close); UCX is never called from one of its callbacks;
an endpoint's failure is looked at before a flush counts as delivery; a peer is spoken to only in a session that both have proven.

Sleeping: while something is out and moves, `busy` keeps the thread awake for SPIN_S after the last movement; otherwise `arm` and the
descriptors wake it. UCX refuses to arm while a send waits for room that a stopped peer does not make (there is no event for it): then the
thread looks again every few milliseconds instead of spinning, and only as long as that lasts.
"""

from __future__ import annotations

import logging

import numpy as np

from pd_serve.clock import Clock, MonotonicClock
from pd_serve.errors import OutOfBoundsError, TransportError
from pd_serve.ids import LeaseId, PeerId
from pd_serve.protocol.notify import MAX_NOTICE_NBYTES
from pd_serve.transport.base import (
    EventSink,
    Flushed,
    Region,
    TransportCounters,
    TransportSettings,
    WriteBatch,
    WriteWindow,
)
from pd_serve.transport.ucx.bindings import open_binding
from pd_serve.transport.ucx.departures import Departures
from pd_serve.transport.ucx.inbox import Inbox
from pd_serve.transport.ucx.joining import Joining
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.messages import WIRE_VERSION, JoinCodec, Record, session_codec
from pd_serve.transport.ucx.metadata import LaneAddress, MetadataCodec, UcxMetadata
from pd_serve.transport.ucx.peer import Node, Phase
from pd_serve.transport.ucx.pool import Pool
from pd_serve.transport.ucx.ports import Ports
from pd_serve.transport.ucx.process import current_process
from pd_serve.transport.ucx.seam import Binding
from pd_serve.transport.ucx.sessions import SILENCE_LIMIT_S, Sessions
from pd_serve.transport.ucx.writer import Pieces
from pd_serve.transport.windows import check_bounds

PROGRESS_ROUNDS = 64
SPIN_S = 200e-6
STALL_POLL_S = (0.001, 0.004)
"""First and longest pause between looks at a send that waits for a stopped peer."""
WATCH_INTERVAL_S = 0.001
CLOSE_S = 0.5
UNKNOWN_NBYTES = 1 << 62
"""Of a pool of a peer that is not joined: nothing is sent to it, only the local side of a write can be wrong."""

logger = logging.getLogger(__name__)


class UcxTransport:
    """Raises TransportUnavailableError when there is no UCX library, ConfigError for an unknown lane or binding."""

    name = "ucx"

    def __init__(self, settings: TransportSettings, sink: EventSink, binding: Binding | None = None, clock: Clock | None = None) -> None:
        self._settings = settings
        self._sink = sink
        self._clock: Clock = clock or MonotonicClock()
        self._binding = binding or open_binding(settings.binding)
        self._ports: Ports | None = None
        self._node_or_none: Node | None = None
        self._counters = TransportCounters()
        self._moved_at = 0.0
        self._watched_at = 0.0
        self._stall_poll_s = STALL_POLL_S[0]
        self._poll_at: float | None = None
        self._is_closed = False

    # ---- memory

    def allocate_pool(self, nbytes: int) -> Region:
        """The region's buffer must not be touched after `close`."""
        ports = self._open_ports("cpu")
        self._start(ports, Pool.allocate(ports, nbytes, self._settings.probe_nbytes))
        return self._node.pool.region

    def register_pool(self, address: int, nbytes: int, device: str) -> Region:
        ports = self._open_ports(device)
        self._start(ports, Pool.register(ports, Region(1, address, nbytes, None), device, self._settings.probe_nbytes))
        return self._node.pool.region

    # ---- peers

    def export_metadata(self) -> bytes:
        node = self._node
        metadata = UcxMetadata(
            peer=self._settings.self_id,
            wire_version=WIRE_VERSION,
            ucx_version=self._binding.version,
            messaging=self._binding.messaging,
            host=self._settings.host,
            host_id=self._settings.host_id,
            process=node.process,
            lanes=tuple(LaneAddress(lane, node.ports[lane].address) for lane in node.ports.lanes),
            shm_voice=node.ports.voice(Lane.SHM).address if Lane.SHM in node.ports.lanes else b"",
        )
        return MetadataCodec(self._settings.secret).encode(metadata)

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        self._joining.add(peer, metadata)

    def remove_peer(self, peer: PeerId) -> None:
        if not self._is_closed:
            self._sessions.remove(peer)

    def hard_fence(self, peer: PeerId) -> bool:
        return self._node.fences.kill(peer)

    # ---- writing

    def open_window(self, window: WriteWindow) -> None:
        """Raises OutOfBoundsError when the ranges are not inside the pool."""
        nbytes = self._node.pool.region.nbytes
        if len(window.starts) and (int(window.starts[0]) < 0 or int(window.ends[-1]) > nbytes):
            raise OutOfBoundsError(f"window [{window.starts[0]}, {window.ends[-1]}) of a pool of {nbytes} bytes")
        self._node.windows.open(window)

    def close_window(self, lease_id: LeaseId) -> bool:
        window = self._node.windows.close(lease_id)
        return window is not None and not any(self._node.fences.can_write(writer) for writer in window.writers)

    def write(self, batch: WriteBatch) -> None:
        node = self._node
        peer = node.peers.get(batch.peer)
        is_joined = peer is not None and peer.phase is Phase.JOINED
        answer = peer.handshake.answer if peer is not None else None
        local_nbytes = node.pool.region.nbytes
        ops = np.array(batch.ops, order="C")  # this thread's own: what was checked must not change
        if check_bounds(ops, local_nbytes, answer.pool.nbytes if is_joined and answer is not None else UNKNOWN_NBYTES) == 0:
            return
        if peer is None or peer.writer is None or not is_joined:
            self._sessions.drop_write(batch.peer)
            return
        peer.is_dirty = True
        peer.writer.write(Pieces(batch.lease_id, batch.epoch, ops))
        self._sessions.pump(peer)

    def flush(self, peer: PeerId, token: int) -> None:
        node = self._node
        known = node.peers.get(peer)
        is_joined = known is not None and known.phase is Phase.JOINED
        if self._sessions.take_dropped(peer):
            node.events.append(Flushed(token, False, "writes before this flush were dropped: the peer was not joined"))
        elif known is None or known.writer is None or not is_joined:
            node.events.append(Flushed(token, False, "the peer is not joined"))
        else:
            known.is_dirty = False
            known.writer.flush(token)
            self._sessions.pump(known)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        """Raises TransportError for a payload above MAX_NOTICE_NBYTES."""
        if len(payload) > MAX_NOTICE_NBYTES:
            raise TransportError(f"notice of {len(payload)} bytes, at most {MAX_NOTICE_NBYTES}")
        known = self._node.peers.get(peer)
        if known is not None and known.phase is Phase.JOINED:
            self._node.send_session(known, Record(payload))

    # ---- progress

    def progress(self) -> bool:
        if self._is_closed:
            return False
        node = self._node
        moved = self._deliver()
        if self._is_closed:
            return moved  # by the sink
        for port in node.ports:
            rounds = 0
            while rounds < PROGRESS_ROUNDS and port.worker.progress():
                rounds += 1
            moved |= rounds > 0
        while self._inbox.joins:
            self._joining.on_message(self._inbox.joins.popleft())
        while self._inbox.session_messages:
            self._sessions.on_message(*self._inbox.session_messages.popleft())
        now = self._clock.now()
        for peer in list(node.peers.values()):
            moved |= self._sessions.care(peer, now)
        if not moved or now - self._watched_at >= WATCH_INTERVAL_S:
            self._watched_at = now
            moved |= self._sessions.watch()
        self._joining.tick(now)
        if not self._departures.is_idle:
            moved |= self._departures.pump(now)
        moved |= self._deliver()
        if moved:
            self._moved_at = now
            self._stall_poll_s = STALL_POLL_S[0]
            self._poll_at = None
        return moved

    def busy(self) -> bool:
        if self._is_closed:
            return False
        node = self._node
        if node.events:
            return True
        if self._clock.now() - self._moved_at >= SPIN_S:
            return False
        return any(peer.is_pending for peer in node.peers.values())

    def arm(self) -> bool:
        node = self._node
        if node.events or not self._inbox.is_empty:
            return False
        self._poll_at = None
        num_refused = sum(not port.worker.arm() for port in node.ports)
        if num_refused == 0:
            return True
        if self._clock.now() - self._moved_at < SPIN_S:
            return False
        self._poll_at = self._clock.now() + self._stall_poll_s
        self._stall_poll_s = min(2 * self._stall_poll_s, STALL_POLL_S[1])
        return True

    def wait_fds(self) -> tuple[int, ...]:
        node = self._node
        return (*(port.worker.efd for port in node.ports), node.fences.fileno())

    def next_deadline(self) -> float | None:
        waiting = [peer.waiting_since + SILENCE_LIMIT_S for peer in self._node.peers.values() if peer.waiting_since is not None]
        times = (self._joining.next_deadline(), self._sessions.next_deadline(), self._departures.next_deadline(), self._poll_at, *waiting)
        return min((time for time in times if time is not None), default=None)

    # ---- telling

    @property
    def library(self) -> str:
        """For people: the binding and the version of what it binds."""
        return f"{self._binding.name} {self._binding.version}"

    def lanes(self) -> tuple[str, ...]:
        return tuple(lane.label for lane in self._open_ports("cpu").lanes)

    def counters(self) -> TransportCounters:
        return self._counters

    def close(self) -> None:
        """Says goodbye for at most CLOSE_S, then lets go of everything. Flushes that were pending end with ok=False."""
        if self._is_closed:
            return
        self._is_closed = True
        node = self._node_or_none
        if node is not None:
            self._departures.is_closing = True
            for peer in list(node.peers.values()):
                self._sessions.fail_flushes(peer, "closed")
                self._departures.begin(peer, "closed")
            deadline = self._clock.now() + CLOSE_S
            while node.leaving and self._clock.now() < deadline:
                for port in node.ports:
                    port.worker.progress()
                while self._inbox.session_messages:
                    self._sessions.on_message(*self._inbox.session_messages.popleft())
                self._departures.pump(self._clock.now())
            self._departures.close()
            for event in node.events:
                if isinstance(event, Flushed):
                    self._sink(event)
            node.events.clear()
            node.ports.close_workers()
            node.pool.close()
            node.fences.close()
        elif self._ports is not None:
            self._ports.close_workers()
        if self._ports is not None:
            self._ports.close_contexts()

    # ---- inside

    @property
    def _node(self) -> Node:
        if self._node_or_none is None or self._is_closed:
            raise TransportError("closed" if self._is_closed else "no pool: call allocate_pool or register_pool first")
        return self._node_or_none

    def _open_ports(self, device: str) -> Ports:
        """Lanes of a GPU's pool need other UCX transports than those of host memory, so they are opened with the pool."""
        if self._node_or_none is not None and device != "cpu":
            raise TransportError("a transport has one pool")
        if self._ports is None:
            self._ports = Ports(self._binding, self._settings, device)
        return self._ports

    def _start(self, ports: Ports, pool: Pool) -> None:
        if self._node_or_none is not None:
            pool.close()
            raise TransportError("a transport has one pool")
        self._node_or_none = node = Node(
            settings=self._settings,
            clock=self._clock,
            binding=self._binding,
            ports=ports,
            pool=pool,
            process=current_process(),
            join_codec=JoinCodec(self._settings.secret),
            session_codec=session_codec(),
            counters=self._counters,
        )
        self._inbox = Inbox(node)
        self._departures = Departures(node)
        self._joining = Joining(node, self._departures)
        self._sessions = Sessions(node, self._joining, self._departures)

    def _deliver(self) -> bool:
        """Hand over the events there are now; the sink may call back into the transport."""
        events = self._node.events
        count = len(events)
        for _ in range(count):
            if not events:
                break  # the sink removed a peer or closed the transport
            self._sink(events.popleft())
        return count > 0
