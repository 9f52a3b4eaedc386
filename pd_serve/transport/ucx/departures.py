"""Letting go of peers without waiting: last puts flushed, Bye sent, endpoint closed; all with one deadline, by force after it.

Closing is always by force: a graceful close of a peer that has stopped reading never ends. The Bye tells the other side
that this one has let go of its memory, so it must be the last thing after the last write.
"""

from __future__ import annotations

from pd_serve.errors import TransportError
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.messages import Bye, Hello, Refusal
from pd_serve.transport.ucx.one_sided import OneSidedWriter
from pd_serve.transport.ucx.peer import Node, Peer, Phase
from pd_serve.transport.ucx.seam import IN_PROGRESS, Channel, Endpoint, Request

DEPARTURE_S = 1.0
MAX_STRANGERS = 16
"""Refusals to processes that were never added, under way at once; past that they find out by their own deadline."""


class Departures:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.is_closing = False
        """This process ends: nobody is left who would want to know when a peer has let go of the pool."""
        self._strangers: list[tuple[Endpoint, Request, float]] = []

    def begin(self, peer: Peer, detail: str | None) -> None:
        """The peer is known no more from here on. `detail` goes into a Bye if the peer can still be reached; None says nothing."""
        node = self._node
        node.peers.pop(peer.id, None)
        can_speak = peer.is_connected and peer.handshake.outgoing_token is not None
        if not can_speak or detail is None:
            self._end(peer)
            return
        peer.phase = Phase.LEAVING
        peer.deadline = node.clock.now() + DEPARTURE_S
        peer.bye = detail[:1024]
        if peer.writer is not None:
            peer.writer.abort("leaving")
        node.leaving.append(peer)
        self._advance(peer)

    def pump(self, now: float) -> bool:
        moved = False
        for peer in list(self._node.leaving):
            moved |= self._advance(peer)
            if now >= peer.deadline and peer in self._node.leaving:
                self._end(peer)
                moved = True
        for entry in list(self._strangers):
            endpoint, request, deadline = entry
            if request.poll() != IN_PROGRESS or endpoint.failure is not None or now >= deadline:
                endpoint.close()
                self._strangers.remove(entry)
                moved = True
        return moved

    @property
    def is_idle(self) -> bool:
        return not self._node.leaving and not self._strangers

    def next_deadline(self) -> float | None:
        return min([peer.deadline for peer in self._node.leaving] + [entry[2] for entry in self._strangers], default=None)

    def refuse_stranger(self, hello: Hello, detail: str) -> None:
        """Tell the sender of an authentic hello, who may never have been added here, that it has come to the wrong place."""
        node = self._node
        if len(self._strangers) >= MAX_STRANGERS or hello.lane not in {lane.value for lane in node.ports.lanes}:
            return
        message = node.join_codec.encode(Refusal(node.settings.self_id, hello.nonce, detail))
        try:
            endpoint = node.ports.voice(Lane(hello.lane)).worker.connect(hello.reply_address)
        except TransportError:
            return
        endpoint.send(Channel.JOIN, message)
        self._strangers.append((endpoint, endpoint.flush(), node.clock.now() + DEPARTURE_S))

    def close(self) -> None:
        for peer in list(self._node.leaving):
            self._end(peer)
        for endpoint, _, _ in self._strangers:
            endpoint.close()
        self._strangers.clear()

    def _advance(self, peer: Peer) -> bool:
        data_endpoint = peer.data_endpoint
        if data_endpoint is None or not peer.is_connected:
            self._end(peer)
            return True
        if peer.bye is not None:
            if isinstance(peer.writer, OneSidedWriter):
                peer.closing = peer.closing or data_endpoint.flush()
                if peer.closing.poll() == IN_PROGRESS:
                    return False
            self._node.send_session(peer, Bye(peer.bye))
            peer.bye = None
        peer.reap()
        if peer.sends:
            return False
        if self.is_closing or not self._node.fences.can_write(peer.id):
            self._end(peer)
            return True
        return False  # it can still write here: wait for its own Bye, until the deadline

    def _end(self, peer: Peer) -> None:
        peer.phase = Phase.LEAVING
        if peer in self._node.leaving:
            self._node.leaving.remove(peer)
        self._node.close_sessions(peer)
        peer.close()
