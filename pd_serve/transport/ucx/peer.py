"""One peer of this process, and what all parts of the transport share: Node. Data with the few sends that everybody makes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from pd_serve.clock import Clock
from pd_serve.errors import TransportError
from pd_serve.ids import PeerId
from pd_serve.transport.base import TransportCounters, TransportEvent, TransportSettings
from pd_serve.transport.ucx.checked import Inbound
from pd_serve.transport.ucx.fences import Fences
from pd_serve.transport.ucx.handshake import Handshake
from pd_serve.transport.ucx.messages import JoinCodec, JoinMessage, SessionMessage
from pd_serve.transport.ucx.metadata import UcxMetadata
from pd_serve.transport.ucx.pool import Pool
from pd_serve.transport.ucx.ports import Port, Ports
from pd_serve.transport.ucx.process import ProcessIdentity
from pd_serve.transport.ucx.seam import IN_PROGRESS, Binding, Channel, Endpoint, Request
from pd_serve.transport.ucx.writer import Writer
from pd_serve.transport.windows import WindowTable
from pd_serve.wire import Codec

MAX_UNSENT_CONTROL = 4096
"""Control messages in the hands of UCX for one peer; past that a peer has stopped reading, and notices to it are dropped."""


class Phase(Enum):
    JOINING = "joining"
    PROBING = "probing"
    JOINED = "joined"
    LEAVING = "leaving"
    """Not known to anybody any more; its last messages are being sent."""


@dataclass(slots=True, eq=False)
class Peer:
    id: PeerId
    metadata: UcxMetadata
    port: Port
    """Of the lane that bytes go over."""
    voice: Port
    """What messages go over: the same, but for shared memory."""
    handshake: Handshake
    is_local: bool
    deadline: float
    """Of the join, then of the departure."""
    phase: Phase = Phase.JOINING
    endpoint: Endpoint | None = None
    """For messages."""
    data_endpoint: Endpoint | None = None
    """For puts; the same unless the lane is shared memory."""
    num_endpoints: int = 0
    failure: str = "no answer to the hello"
    """The latest thing that stands in the way of the join."""
    next_hello: float = 0.0
    pings: dict[int, float] = field(default_factory=dict)
    round_trip_s: float = 0.0
    writer: Writer | None = None
    inbound: Inbound = field(default_factory=Inbound)
    held: list[bytes] = field(default_factory=list)
    """Notices that came before this side's own join was complete."""
    sends: deque[Request] = field(default_factory=deque)
    is_dirty: bool = False
    """Written to since the last flush."""
    waiting_since: float | None = None
    """Since when nothing of what is pending has moved."""
    failed_at: float | None = None
    """When its connection was first seen broken while its process still lived."""
    probe_started: float = 0.0
    bandwidth: float = 0.0
    settled_at: float = 0.0
    """When a join may count, at the earliest: see joining.SETTLE_S."""
    bye: str | None = None
    """What to say on leaving, once all writes are out; None: nothing more to say."""
    closing: Request | None = None

    @property
    def address(self) -> str:
        """For people."""
        return f"{self.metadata.host} over {self.port.lane.label}"

    @property
    def is_connected(self) -> bool:
        return self.endpoint is not None and self.connection_failure is None

    @property
    def connection_failure(self) -> str | None:
        """Of either endpoint; None without one, too."""
        failures = [endpoint.failure for endpoint in (self.endpoint, self.data_endpoint) if endpoint is not None]
        return next((failure for failure in failures if failure is not None), None)

    def connect(self) -> None:
        """Make new endpoints in place of those that failed or never were."""
        self._drop_sends()
        self._close_endpoints()
        try:
            self.num_endpoints += 1
            lane = self.port.lane
            voice = self.voice.worker.connect(self.metadata.voice_on(lane))
            self.endpoint = voice
            self.data_endpoint = voice if self.voice is self.port else self.port.worker.connect(self.metadata.address_on(lane))
        except TransportError as error:
            self._close_endpoints()
            self.failure = str(error)

    def send(self, channel: Channel, data: bytes) -> None:
        """Silently nothing when the peer cannot be reached or has stopped reading."""
        self.reap()
        if self.endpoint is None or not self.is_connected or len(self.sends) >= MAX_UNSENT_CONTROL:
            return
        request = self.endpoint.send(channel, data)
        if request.poll() == IN_PROGRESS:
            self.sends.append(request)

    def reap(self) -> bool:
        moved = False
        while self.sends and self.sends[0].poll() != IN_PROGRESS:
            self.sends.popleft()
            moved = True
        return moved

    @property
    def is_pending(self) -> bool:
        return bool(self.sends) or (self.writer is not None and self.writer.is_pending)

    def close(self) -> None:
        """Keys, then requests, then the endpoint; buffers of what was under way are dropped last. Idempotent."""
        if self.writer is not None:
            self.writer.close()
        self._drop_sends()
        if self.closing is not None:
            self.closing.release()
        self._close_endpoints()
        self.writer = None

    def _close_endpoints(self) -> None:
        endpoint, data_endpoint = self.endpoint, self.data_endpoint
        self.endpoint = self.data_endpoint = None
        if endpoint is not None:
            endpoint.close()
        if data_endpoint is not None and data_endpoint is not endpoint:
            data_endpoint.close()

    def _drop_sends(self) -> None:
        for request in self.sends:
            request.release()
        self.sends.clear()


@dataclass(slots=True, eq=False)
class Node:
    """This process's side of everything, owned by the transport thread."""

    settings: TransportSettings
    clock: Clock
    binding: Binding
    ports: Ports
    pool: Pool
    process: ProcessIdentity
    join_codec: JoinCodec
    session_codec: Codec[SessionMessage]
    fences: Fences = field(default_factory=Fences)
    windows: WindowTable = field(default_factory=WindowTable)
    counters: TransportCounters = field(default_factory=TransportCounters)
    peers: dict[PeerId, Peer] = field(default_factory=dict)
    leaving: list[Peer] = field(default_factory=list)
    sessions: dict[bytes, tuple[Peer, bytes]] = field(default_factory=dict)
    """{token that a peer must put before its messages: (peer, its nonce)}."""
    events: deque[TransportEvent] = field(default_factory=deque)

    def send_join(self, peer: Peer, message: JoinMessage) -> None:
        peer.send(Channel.JOIN, self.join_codec.encode(message))

    def send_session(self, peer: Peer, message: SessionMessage) -> None:
        token = peer.handshake.outgoing_token
        if token is not None:
            peer.send(Channel.SESSION, token + self.session_codec.encode(message))

    def open_sessions(self, peer: Peer) -> None:
        """Accept messages with any token that the peer's handshake has come to know."""
        for nonce, token in peer.handshake.incoming_tokens.items():
            self.sessions[token] = (peer, nonce)

    def close_sessions(self, peer: Peer) -> None:
        for token in [token for token, (owner, _) in self.sessions.items() if owner is peer]:
            del self.sessions[token]
