"""Bringing peers in: hello, answer, proof, probe. Drives handshake.py over UCX and measures the lane before a peer counts as joined.

A join never ends silently: PeerJoined, or PeerRefused with the address and the latest obstacle. A refused peer is forgotten; the caller
adds it again when it still wants it, and the two sides need not be in step (each repeats its hello until its own deadline).
"""

from __future__ import annotations

import logging
import secrets

from pd_serve.errors import ProtocolError, TransportError
from pd_serve.ids import PeerId
from pd_serve.transport.base import NoticeReceived, PeerJoined, PeerRefused
from pd_serve.transport.ucx.checked import NUM_SLOTS, CheckedWriter, Source
from pd_serve.transport.ucx.departures import Departures
from pd_serve.transport.ucx.handshake import Handshake, major_minor
from pd_serve.transport.ucx.lanes import choose_lane
from pd_serve.transport.ucx.mapped import MappedMemory
from pd_serve.transport.ucx.messages import NONCE_NBYTES, WIRE_VERSION, Answer, FlushRequest, Hello, MemoryOffer, Ping, Refusal
from pd_serve.transport.ucx.metadata import MetadataCodec, UcxMetadata
from pd_serve.transport.ucx.one_sided import OneSidedWriter, Side
from pd_serve.transport.ucx.peer import Node, Peer, Phase
from pd_serve.transport.ucx.seam import Endpoint, Memory
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES, Completion, Writer

HELLO_RETRY_S = 0.2
SETTLE_S = 2.2
"""How long a new connection to a process that was joined before must have lived to count. UCX may pair it with one that the other side gave
up while this process stood still; such a one carries messages until a keepalive (two intervals at most) finds its other end gone.
"""
WARM_TOKEN = -1
PROBE_TOKEN = -2
"""Flush tokens of the two passes of the probe: the first touches the memory, the second is timed."""

logger = logging.getLogger(__name__)


class Joining:
    def __init__(self, node: Node, departures: Departures) -> None:
        self._node = node
        self._departures = departures
        self._metadata_codec = MetadataCodec(node.settings.secret)
        self._met: set[PeerId] = set()
        """Joined before."""

    def add(self, peer_id: PeerId, encoded: bytes) -> None:
        """Begin to join. What is wrong at once is told as PeerRefused, too."""
        node = self._node
        if peer_id in node.peers:
            return
        try:
            metadata = self._metadata_codec.decode(encoded)
        except ProtocolError as error:
            node.counters.refused_hellos += 1
            self._refuse_unknown(peer_id, f"its transport metadata: {error}")
            return
        obstacle = self._obstacle(peer_id, metadata)
        if obstacle is not None:
            self._refuse_unknown(peer_id, obstacle)
            return
        is_local = metadata.host_id == node.settings.host_id
        lane = choose_lane(node.ports.lanes, [entry.lane for entry in metadata.lanes], is_local)
        if lane is None:
            theirs = ", ".join(entry.lane.value for entry in metadata.lanes)
            ours = ", ".join(lane.value for lane in node.ports.lanes)
            self._refuse_unknown(peer_id, f"no common lane with {metadata.host}: it has {theirs}; here {ours}; same host: {is_local}")
            return
        if is_local and not node.fences.watch(peer_id, metadata.process):
            self._refuse_unknown(peer_id, f"its process (pid {metadata.process.pid}) has ended")
            return
        port, voice = node.ports[lane], node.ports.voice(lane)
        hello = Hello(
            sender=node.settings.self_id,
            receiver=peer_id,
            nonce=secrets.token_bytes(NONCE_NBYTES),
            wire_version=WIRE_VERSION,
            ucx_version=node.binding.version,
            pool_nbytes=node.pool.region.nbytes,
            lane=lane.value,
            process=node.process,
            reply_address=voice.address,
        )
        handshake = Handshake(node.join_codec, hello, node.pool.pool_offer(lane), node.pool.scratch_offer(lane))
        peer = Peer(peer_id, metadata, port, voice, handshake, is_local, node.clock.now() + node.settings.join_timeout_s)
        node.peers[peer_id] = peer
        self._knock(peer)

    def on_message(self, data: bytes) -> None:
        """A JOIN message, from anyone."""
        node = self._node
        try:
            message, is_authentic = node.join_codec.decode(data)
        except ProtocolError:
            node.counters.refused_hellos += 1
            return
        peer = node.peers.get(message.sender)
        if not is_authentic:
            node.counters.refused_hellos += 1
            if peer is not None and peer.phase is Phase.JOINING:
                # Anyone can send such a message: it explains a failing join, it does not end one.
                peer.failure = "the digest of its hello is wrong: is the cluster secret the same on both?"
            return
        if isinstance(message, Hello):
            self._on_hello(message, peer)
        elif isinstance(message, Answer):
            if peer is not None and peer.phase is Phase.JOINING and message.receiver == node.settings.self_id:
                self._on_answer(message, peer)
        else:
            self._on_refusal(message)

    def on_proof(self, peer: Peer, their_nonce: bytes) -> None:
        """A session message came with the token of that nonce."""
        if peer.phase is Phase.JOINING:
            peer.handshake.on_proof(their_nonce)
            self._advance(peer)

    def on_pong(self, peer: Peer, seq: int) -> None:
        sent = peer.pings.pop(seq, None)
        if sent is not None:
            round_trip = self._node.clock.now() - sent
            peer.round_trip_s = min(peer.round_trip_s or round_trip, round_trip)
            self._welcome(peer)

    def on_probe(self, peer: Peer, completion: Completion) -> None:
        """One of the two flushes of the probe has ended."""
        node = self._node
        now = node.clock.now()
        if not completion.ok:
            self.refuse(peer, f"the probe write failed: {completion.detail}")
        elif completion.token == WARM_TOKEN:
            peer.probe_started = now
            self._probe(peer, PROBE_TOKEN)
        else:
            nbytes = min(node.settings.probe_nbytes, self._answer(peer).scratch.nbytes)
            peer.bandwidth = nbytes / max(now - peer.probe_started, 1e-9)
            if peer.bandwidth < node.settings.min_bandwidth:
                least = node.settings.min_bandwidth
                self.refuse(peer, f"{peer.port.lane.label} moved {peer.bandwidth:.3g} bytes/s, the least allowed is {least:.3g}")
            else:
                self._welcome(peer)

    def tick(self, now: float) -> None:
        """Repeat hellos, renew failed endpoints, end joins that took too long."""
        for peer in list(self._node.peers.values()):
            if peer.phase is Phase.JOINED:
                continue
            if now >= peer.deadline:
                waited = self._node.settings.join_timeout_s
                self.refuse(peer, f"not joined within {waited:g} s at {peer.address}: {peer.failure}")
            elif peer.phase is Phase.JOINING and now >= peer.next_hello:
                self._knock(peer)
            else:
                self._welcome(peer)

    def next_deadline(self) -> float | None:
        now = self._node.clock.now()
        times = [min(peer.deadline, _next_look(peer, now)) for peer in self._node.peers.values() if peer.phase is not Phase.JOINED]
        return min(times, default=None)

    def renew(self, peer: Peer, detail: str) -> None:
        """The endpoint failed during the probe (UCX may have given it a connection that the peer had already closed): try another."""
        if peer.writer is not None:
            peer.writer.close()
            peer.writer = None
        peer.failure = detail
        peer.phase = Phase.JOINING

    def refuse(self, peer: Peer, detail: str) -> None:
        """End a join that has not succeeded, and let the other side know if it can be reached."""
        self._node.events.append(PeerRefused(peer.id, detail))
        logger.warning("peer %s refused: %s", peer.id, detail)
        self._departures.begin(peer, f"refused: {detail}")
        self._node.fences.forget(peer.id)

    def _obstacle(self, peer_id: PeerId, metadata: UcxMetadata) -> str | None:
        node = self._node
        for name, ours, theirs in (
            ("identity", peer_id, metadata.peer),
            ("transport protocol", WIRE_VERSION, metadata.wire_version),
            ("UCX", major_minor(node.binding.version), major_minor(metadata.ucx_version)),
            ("messaging (binding)", node.binding.messaging, metadata.messaging),
        ):
            if ours != theirs:
                return f"{name} differs: {ours} here, {theirs} in the metadata of {metadata.peer}"
        return None

    def _refuse_unknown(self, peer_id: PeerId, detail: str) -> None:
        self._node.events.append(PeerRefused(peer_id, detail))
        logger.warning("peer %s refused: %s", peer_id, detail)

    def _knock(self, peer: Peer) -> None:
        now = self._node.clock.now()
        peer.next_hello = now + HELLO_RETRY_S
        if not peer.is_connected:
            if peer.connection_failure is not None:
                peer.failure = f"connection: {peer.connection_failure}"
            self._connect(peer)
        self._node.send_join(peer, peer.handshake.hello)
        self._ping(peer)
        self._advance(peer)

    def _connect(self, peer: Peer) -> None:
        peer.connect()
        if peer.id in self._met:
            peer.settled_at = self._node.clock.now() + SETTLE_S

    def _ping(self, peer: Peer) -> None:
        if peer.handshake.answer is not None:
            seq = len(peer.pings) + 1
            peer.pings[seq] = self._node.clock.now()
            self._node.send_session(peer, Ping(seq))

    def _on_hello(self, hello: Hello, peer: Peer | None) -> None:
        node = self._node
        if hello.receiver != node.settings.self_id:
            node.counters.refused_hellos += 1
            self._departures.refuse_stranger(hello, f"{hello.receiver} is not here: this is {node.settings.self_id}")
            return
        if peer is None:
            return  # not added here yet; it will say hello again
        obstacle = peer.handshake.refusal_of(hello)
        if obstacle is not None:
            node.counters.refused_hellos += 1
            if peer.phase is Phase.JOINING:
                node.send_join(peer, Refusal(node.settings.self_id, hello.nonce, obstacle))
                self.refuse(peer, obstacle)
            return
        if peer.is_local and not node.fences.watch(peer.id, hello.process):
            return  # said before its process ended
        is_news = hello.nonce not in peer.handshake.incoming_tokens
        answer = peer.handshake.on_hello(hello)
        if answer.pool.key:
            node.fences.expose(peer.id)
        node.open_sessions(peer)
        if not peer.is_connected:
            if peer.phase is not Phase.JOINING:
                return
            self._connect(peer)
        node.send_join(peer, answer)
        if is_news and peer.phase is Phase.JOINING and peer.handshake.answer is None:
            node.send_join(peer, peer.handshake.hello)  # the earlier one came before this side was added there
        elif peer.phase is Phase.PROBING and hello.nonce == self._answer(peer).nonce:
            self._ask_again(peer)

    def _ask_again(self, peer: Peer) -> None:
        """It is not as far as this side, so it may have another connection, and what it answered over the former one may be lost.

        UCX pairs a new connection with the half that an earlier try left: the handshake passes, what follows is lost until that is noticed.
        """
        if peer.bandwidth > 0.0:
            self._ping(peer)
            return
        self.renew(peer, "answers to the probe were lost")
        peer.num_endpoints += 1  # messages of the probe are counted from one again
        self._advance(peer)

    def _on_answer(self, answer: Answer, peer: Peer) -> None:
        if peer.handshake.on_answer(answer):
            self._node.open_sessions(peer)
            self._ping(peer)
            self._advance(peer)

    def _on_refusal(self, refusal: Refusal) -> None:
        for peer in self._node.peers.values():
            if peer.phase is Phase.JOINING and peer.handshake.hello.nonce == refusal.echo:
                self.refuse(peer, f"refused by {refusal.sender} at {peer.address}: {refusal.detail}")
                return

    def _advance(self, peer: Peer) -> None:
        if not peer.handshake.is_complete or peer.phase is not Phase.JOINING:
            return
        if not peer.is_connected:
            return  # renewed with the next hello
        try:
            peer.writer = self._make_writer(peer)
        except TransportError as error:
            self.refuse(peer, f"its memory cannot be written to: {error}")
            return
        peer.phase = Phase.PROBING
        self._ping(peer)
        self._probe(peer, WARM_TOKEN)

    def _probe(self, peer: Peer, token: int) -> None:
        assert peer.writer is not None
        peer.writer.probe(min(self._node.settings.probe_nbytes, self._answer(peer).scratch.nbytes, self._node.pool.scratch_nbytes))
        peer.writer.flush(token)
        peer.writer.pump()

    def _make_writer(self, peer: Peer) -> Writer:
        node = self._node
        answer = self._answer(peer)
        endpoint, data_endpoint = peer.endpoint, peer.data_endpoint
        if endpoint is None or data_endpoint is None or not peer.is_connected:
            raise TransportError("the connection has failed")
        if not answer.pool.key:
            if node.binding.messaging == "tag" and not node.pool.copier.can_gather:
                raise TransportError(f"{node.binding.name} sends no messages out of GPU memory: use the libucp binding or a one-sided lane")
            token = peer.handshake.outgoing_token
            assert token is not None

            def send(request: FlushRequest) -> None:
                node.send_session(peer, request)

            copier = node.pool.copier
            staging = copier.open_staging(NUM_SLOTS, MAX_PIECE_NBYTES)
            source = Source(node.pool.region.address, node.pool.scratch_address, copier.can_gather, staging)
            return CheckedWriter(endpoint, token, peer.num_endpoints, source, send)
        lane, region = peer.port.lane, node.pool.region
        scratch_address, scratch_memory = node.pool.scratch_on(lane)
        sides = (
            (answer.pool, region.address, region.nbytes, node.pool.memory_on(lane)),
            (answer.scratch, scratch_address, node.pool.scratch_nbytes, scratch_memory),
        )
        pool, scratch = (self._side(data_endpoint, *side) for side in sides)
        return OneSidedWriter(data_endpoint, pool, scratch, lambda: node.fences.is_alive(peer.id))

    def _side(self, endpoint: Endpoint, offer: MemoryOffer, address: int, nbytes: int, memory: Memory | None) -> Side:
        key = endpoint.unpack_key(offer.key)
        mapped: MappedMemory | None = None
        if self._node.pool.device == "cpu":
            seen_at = key.address_here(offer.address, offer.nbytes)
            mapped = MappedMemory(address, nbytes, seen_at, offer.nbytes) if seen_at is not None else None
        return Side(address, memory, offer.address, key, mapped)

    @staticmethod
    def _answer(peer: Peer) -> Answer:
        assert peer.handshake.answer is not None
        return peer.handshake.answer

    def _welcome(self, peer: Peer) -> None:
        """Once both the probe and a ping have been answered, and the connection has settled."""
        if peer.phase is not Phase.PROBING or peer.bandwidth == 0.0 or peer.round_trip_s == 0.0:
            return
        node = self._node
        if node.clock.now() < peer.settled_at:
            return
        self._met.add(peer.id)
        peer.phase = Phase.JOINED
        one_sided = isinstance(peer.writer, OneSidedWriter) or node.fences.can_write(peer.id)
        joined = PeerJoined(peer.id, peer.port.lane.label, one_sided, peer.bandwidth, peer.round_trip_s)
        node.events.append(joined)
        node.events.extend(NoticeReceived(peer.id, payload) for payload in peer.held)
        peer.held.clear()
        how = "one-sided" if one_sided else "checked"
        logger.info(
            "peer %s joined over %s (%s): %.3g bytes/s, %.0f us", peer.id, peer.address, how, peer.bandwidth, peer.round_trip_s * 1e6
        )


def _next_look(peer: Peer, now: float) -> float:
    if peer.phase is Phase.JOINING:
        return peer.next_hello
    return peer.settled_at if peer.settled_at > now else peer.deadline
