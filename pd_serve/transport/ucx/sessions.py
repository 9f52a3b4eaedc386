"""Joined peers: their messages, their pending writes, and their loss.

A peer is lost when its process ends, its endpoint fails, it says Bye, it joins anew, or nothing of what it owes has moved for a long time.
Its pending flushes fail before PeerLost is told. Whether it can still write here is for fences.py to say.
"""

from __future__ import annotations

import logging

from pd_serve.errors import ProtocolError
from pd_serve.ids import PeerId
from pd_serve.transport.base import Flushed, NoticeReceived, PeerFenced, PeerLost
from pd_serve.transport.ucx.checked import CheckedWriter
from pd_serve.transport.ucx.departures import Departures
from pd_serve.transport.ucx.joining import Joining
from pd_serve.transport.ucx.messages import Bye, FlushReply, FlushRequest, Ping, Pong, SessionMessage
from pd_serve.transport.ucx.peer import Node, Peer, Phase

SILENCE_LIMIT_S = 60.0
"""A joined peer that lets writes or a flush pend this long without any movement is taken for lost (it may join again)."""
MAX_HELD_NOTICES = 256
DEATH_S = 0.1
"""How long a local process may take from closing its connections to its end."""

logger = logging.getLogger(__name__)


class Sessions:
    def __init__(self, node: Node, joining: Joining, departures: Departures) -> None:
        self._node = node
        self._joining = joining
        self._departures = departures
        self._undelivered: set[PeerId] = set()
        self._unfenced: set[PeerId] = set()

    # ---- what was written and never flushed

    def drop_write(self, peer_id: PeerId) -> None:
        """A write to a peer that is not joined: its next flush must not succeed, not even after it has joined again."""
        self._undelivered.add(peer_id)

    def take_dropped(self, peer_id: PeerId) -> bool:
        if peer_id in self._undelivered:
            self._undelivered.remove(peer_id)
            return True
        return False

    # ---- messages

    def on_message(self, peer: Peer, their_nonce: bytes, data: bytes) -> None:
        """A SESSION message with a token that `peer` was given (`their_nonce` tells in which of its joins)."""
        try:
            message = self._node.session_codec.decode(data)
        except ProtocolError:
            logger.warning("peer %s sent a malformed session message of %d bytes", peer.id, len(data))
            return
        if peer.phase is Phase.LEAVING:
            if isinstance(message, Bye):
                self._node.fences.release(peer.id)
            return
        if peer.handshake.is_superseded_by(their_nonce):
            self._supersede(peer)
            return
        self._joining.on_proof(peer, their_nonce)
        self._dispatch(peer, message)

    def _dispatch(self, peer: Peer, message: SessionMessage) -> None:
        node = self._node
        if isinstance(message, Ping):
            node.send_session(peer, Pong(message.seq))
        elif isinstance(message, Pong):
            self._joining.on_pong(peer, message.seq)
        elif isinstance(message, FlushRequest):
            peer.inbound.on_flush(message)
        elif isinstance(message, FlushReply):
            if isinstance(peer.writer, CheckedWriter):
                peer.writer.on_reply(message)
        elif isinstance(message, Bye):
            node.fences.release(peer.id)
            if peer.phase is Phase.JOINED:
                self.lose(peer, f"it left: {message.detail}", can_speak=True)
            else:
                self._joining.refuse(peer, f"it left: {message.detail}")
        elif peer.phase is Phase.JOINED:
            node.events.append(NoticeReceived(peer.id, message.payload))
        elif len(peer.held) < MAX_HELD_NOTICES:
            peer.held.append(message.payload)

    def _supersede(self, peer: Peer) -> None:
        """The peer has begun another join, so it has let go of all it had of this one."""
        self._node.fences.release(peer.id)
        if peer.phase is Phase.JOINED:
            self.lose(peer, "it has joined anew", can_speak=False)
        else:
            self._joining.refuse(peer, "it has begun another join")

    # ---- pending writes

    def care(self, peer: Peer, now: float) -> bool:
        """Advance what is pending for one peer; notice that it has failed. True when something moved."""
        failure = peer.connection_failure
        if peer.phase is not Phase.JOINING and failure is not None:
            if peer.phase is Phase.JOINED:
                if peer.is_local and self._is_dying(peer, now):
                    return False
                self.lose(peer, f"connection: {failure}", can_speak=False)
            else:
                self._joining.renew(peer, f"connection: {failure}")
            return True
        replies = peer.inbound.replies()
        for reply in replies:
            self._node.send_session(peer, reply)
        moved = bool(replies)
        if peer.sends:
            moved |= peer.reap()
        if peer.writer is None:
            return moved
        if peer.writer.is_pending:
            moved |= self.pump(peer)
        moved |= self._complete(peer)
        if moved or not peer.is_pending:
            peer.waiting_since = None
        elif peer.waiting_since is None:
            peer.waiting_since = now
        elif now - peer.waiting_since > SILENCE_LIMIT_S and peer.phase is Phase.JOINED:
            self.lose(peer, f"nothing moved for {SILENCE_LIMIT_S:g} s", can_speak=True)
            return True
        return moved

    def next_deadline(self) -> float | None:
        """When a broken connection is told at the latest."""
        times = [peer.failed_at + DEATH_S for peer in self._node.peers.values() if peer.failed_at is not None]
        return min(times, default=None)

    def _is_dying(self, peer: Peer, now: float) -> bool:
        """A process that ends closes its sockets first. Told of its end, the owner knows at once that it can write no more."""
        if peer.failed_at is None:
            peer.failed_at = now
        return self._node.fences.is_alive(peer.id) and now < peer.failed_at + DEATH_S

    def pump(self, peer: Peer) -> bool:
        writer = peer.writer
        if writer is None:
            return False
        nbytes, writes = writer.num_bytes, writer.num_writes
        moved = writer.pump()
        self._node.counters.bytes_written += writer.num_bytes - nbytes
        self._node.counters.writes += writer.num_writes - writes
        return moved

    def fail_flushes(self, peer: Peer, detail: str) -> None:
        """End every pending flush with ok=False."""
        if peer.writer is not None:
            self._complete(peer)
        if peer.writer is not None:
            peer.writer.abort(detail)
            self._complete(peer)

    def _complete(self, peer: Peer) -> bool:
        if peer.writer is None:
            return False
        completions = peer.writer.take_completions()
        for completion in completions:
            if completion.token >= 0 or peer.phase is Phase.JOINED:
                self._node.events.append(Flushed(completion.token, completion.ok, completion.detail))
            elif peer.phase is Phase.PROBING:
                self._joining.on_probe(peer, completion)
        return bool(completions)

    # ---- loss

    def lose(self, peer: Peer, detail: str, can_speak: bool) -> None:
        node = self._node
        if peer.is_dirty:
            self._undelivered.add(peer.id)
        self.fail_flushes(peer, detail)
        if not node.fences.is_alive(peer.id):
            node.fences.release(peer.id)
            detail = f"its process has ended ({detail})"
        is_fenced = not node.fences.can_write(peer.id)
        node.events.append(PeerLost(peer.id, detail, is_fenced))
        logger.warning("peer %s lost%s: %s", peer.id, "" if is_fenced else " (it may still write)", detail)
        self._departures.begin(peer, "lost" if can_speak else None)
        if is_fenced:
            node.fences.forget(peer.id)
        else:
            self._unfenced.add(peer.id)

    def watch(self) -> bool:
        """Notice processes that have ended and peers that have let go."""
        node = self._node
        moved = False
        for peer_id in node.fences.take_ended():
            moved = True
            peer = node.peers.get(peer_id)
            if peer is None:
                continue
            if peer.phase is Phase.JOINED:
                self.lose(peer, "its process has ended", can_speak=False)
            else:
                self._joining.refuse(peer, "its process has ended")
        for peer_id in [peer_id for peer_id in self._unfenced if not node.fences.can_write(peer_id)]:
            self._unfenced.remove(peer_id)
            node.events.append(PeerFenced(peer_id))
            moved = True
        return moved

    def remove(self, peer_id: PeerId) -> None:
        """Forget the peer; pending flushes fail, nothing else is told of it any more."""
        node = self._node
        peer = node.peers.get(peer_id)
        if peer is not None:
            self.fail_flushes(peer, "the peer was removed")
            self._departures.begin(peer, "removed")
        self._undelivered.discard(peer_id)
        self._unfenced.discard(peer_id)
        node.fences.forget(peer_id)
        kept = [event for event in node.events if isinstance(event, Flushed) or event.peer != peer_id]
        node.events.clear()
        node.events.extend(kept)
