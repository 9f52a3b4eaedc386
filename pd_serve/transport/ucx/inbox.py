"""Where messages arrive: inside the library's progress, from peers and strangers alike.

Data messages are checked and copied here. The others are only checked for a live token (sessions) or counted (joins) and kept for the
owner, who handles them after progress has returned; nothing here calls UCX or raises.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pd_serve.errors import ProtocolError
from pd_serve.transport.ucx.messages import PROBE_LEASE, TOKEN_NBYTES, DataHeader, decode_data_header
from pd_serve.transport.ucx.peer import Node, Peer, Phase
from pd_serve.transport.ucx.seam import Channel
from pd_serve.transport.windows import Verdict

MAX_KEPT = 4096
"""Join messages kept between two calls of progress; a flood beyond is dropped (hellos are repeated)."""


class Inbox:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.joins: deque[bytes] = deque()
        self.session_messages: deque[tuple[Peer, bytes, bytes]] = deque()
        """(peer, its nonce, message without the token)."""
        for port in node.ports:
            port.worker.set_receiver(Channel.JOIN, self._on_join)
            port.worker.set_receiver(Channel.SESSION, self._on_session)
            port.worker.set_receiver(Channel.DATA, self._on_data)

    @property
    def is_empty(self) -> bool:
        return not self.joins and not self.session_messages

    def _on_join(self, header: bytes, _address: int, nbytes: int) -> None:
        if nbytes == 0 and len(self.joins) < MAX_KEPT:
            self.joins.append(header)

    def _on_session(self, header: bytes, _address: int, nbytes: int) -> None:
        session = self._node.sessions.get(header[:TOKEN_NBYTES])
        if session is not None and nbytes == 0:
            self.session_messages.append((*session, header[TOKEN_NBYTES:]))

    def _on_data(self, header: bytes, address: int, nbytes: int) -> None:
        node = self._node
        try:
            data = decode_data_header(header, nbytes)
        except ProtocolError:
            node.counters.refused_writes += 1
            return
        session = node.sessions.get(data.token)
        if session is None or session[0].phase is Phase.LEAVING:
            node.counters.refused_writes += 1
            return
        peer = session[0]
        verdict = self._land(peer, data, address)
        if verdict is not Verdict.ALLOWED:
            node.counters.refused_writes += 1
        peer.inbound.handled(data.stream, is_violation=verdict is Verdict.VIOLATION)

    def _land(self, peer: Peer, data: DataHeader, address: int) -> Verdict:
        """Check all of the message, then copy all of it. Unless it is ALLOWED, nothing was copied."""
        pool = self._node.pool
        offsets, lengths = data.pieces[:, 0], data.pieces[:, 1]
        if data.lease_id == PROBE_LEASE:
            # Lengths are those of bytes that are here; an offset is whatever the header says, so it is never added to.
            if bool(((offsets < 0) | (offsets > pool.scratch_nbytes - lengths)).any()):
                return Verdict.VIOLATION
            base, copy = pool.scratch_address, pool.scratch_copier.copy
        else:
            verdict = self._node.windows.check(peer.id, data.lease_id, data.epoch, offsets, lengths)
            if verdict is not Verdict.ALLOWED:
                return verdict
            base, copy = pool.region.address, pool.copier.copy
        ranges = np.zeros((len(offsets), 3), np.int64)
        ranges[:, 1:] = data.pieces
        np.cumsum(lengths[:-1], out=ranges[1:, 0])
        copy(base, address, ranges)
        return Verdict.ALLOWED
