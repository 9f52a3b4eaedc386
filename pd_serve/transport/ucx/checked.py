"""The same bytes as eager messages that the target checks against its write windows and copies: both ends of that path.

Writer: packs small pieces of one lease into messages of up to PACK_NBYTES, keeps at most MAX_INFLIGHT_NBYTES of messages in the hands of
UCX per peer (a peer that has stopped reading costs that much and no more; the rest waits in the queue), and asks the target, in order
behind the data, to say what it has handled. A flush is only that answer: the local completion of a message says nothing of its arrival.

Receiver: every message is decoded, matched to a live session by its token, to a window by (writer, lease, epoch), and to its ranges, all
before the first byte is copied. A stale message (no live window) is dropped and counted; it fails nobody's flush, since the target
has let go of that lease itself and will take no completion for it. Called inside the library's progress: it calls nothing of UCX.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pd_serve.ids import Epoch, LeaseId
from pd_serve.transport.ucx.messages import MAX_PIECES, PROBE_LEASE, FlushReply, FlushRequest, encode_data_header
from pd_serve.transport.ucx.pinned import Staging
from pd_serve.transport.ucx.seam import IN_PROGRESS, Channel, Endpoint, Request
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES, Completion, Pieces, cut, whole

PACK_NBYTES = 256 * 1024
"""Pieces are gathered into one message up to this size; a piece at least half as large travels alone, uncopied. No message is longer than
MAX_PIECE_NBYTES and its header: see TCP_RX_SEG_SIZE in lanes.py."""
MAX_INFLIGHT_NBYTES = 2 * 1024 * 1024
NUM_SLOTS = MAX_INFLIGHT_NBYTES // MAX_PIECE_NBYTES
"""Of staging, one per message, where the pool is in memory that this process's CPU cannot read."""


class Source(NamedTuple):
    """The memory that is written from."""

    pool_address: int
    scratch_address: int
    can_gather: bool
    """It can be read by this process's CPU."""
    staging: Staging | None = None
    """What the pool's bytes pass through where it cannot; the writer's own. None: they are sent from where they lie."""


class _Columns(NamedTuple):
    """Pieces as lists, none longer than a message."""

    lease_id: LeaseId
    epoch: Epoch
    local: Sequence[int]
    remote: Sequence[int]
    sizes: Sequence[int]

    @staticmethod
    def of(pieces: Pieces) -> _Columns:
        return _Columns(pieces.lease_id, pieces.epoch, *cut(pieces).columns())


class CheckedWriter:
    def __init__(
        self,
        endpoint: Endpoint,
        token: bytes,
        stream: int,
        source: Source,
        send: Callable[[FlushRequest], None],
    ) -> None:
        self._endpoint = endpoint
        self._token = token
        self._stream = stream
        self._source = source
        self._send = send
        self._queue: deque[_Columns | int] = deque()
        self._position = 0
        self._inflight: deque[tuple[Request, int, object]] = deque()
        """Third: what has to live until then; an int is a slot of staging."""
        self._inflight_nbytes = 0
        self._spare: list[ctypes.Array[ctypes.c_char]] = []
        """Memory that pieces are gathered in, to be used again: fresh memory costs more than the copy into it."""
        self._num_messages = 0
        self._seq = 0
        self._awaited: dict[int, int] = {}
        self._completions: list[Completion] = []
        self.num_bytes = 0
        self.num_writes = 0

    def write(self, pieces: Pieces) -> None:
        if len(pieces.ops):
            self._queue.append(_Columns.of(pieces))

    def probe(self, nbytes: int) -> None:
        self._queue.append(_Columns.of(whole(PROBE_LEASE, nbytes)))

    def flush(self, token: int) -> None:
        self._queue.append(token)

    def pump(self) -> bool:
        moved = self._reap()
        while self._queue and self._inflight_nbytes < MAX_INFLIGHT_NBYTES and self._endpoint.failure is None:
            head = self._queue[0]
            if isinstance(head, _Columns):
                if not self._send_some(head):
                    break
            else:
                self._queue.popleft()
                self._seq += 1
                self._awaited[self._seq] = head
                self._send(FlushRequest(self._seq, self._stream, self._num_messages))
            moved = True
        return moved

    def on_reply(self, reply: FlushReply) -> None:
        """The target has handled everything before flush `seq`."""
        token = self._awaited.pop(reply.seq, None)
        if token is None:
            return  # of a flush that was aborted
        detail = f"{reply.num_violations} messages were outside the window of their lease" if reply.num_violations else ""
        self._completions.append(Completion(token, not detail, detail))

    def take_completions(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    @property
    def is_pending(self) -> bool:
        return bool(self._queue or self._inflight or self._awaited)

    def abort(self, detail: str) -> None:
        pending = [*self._awaited.values(), *(item for item in self._queue if isinstance(item, int))]
        self._queue.clear()
        self._position = 0
        self._awaited.clear()
        self._completions += [Completion(token, False, detail) for token in pending]

    def close(self) -> None:
        for request, _, _ in self._inflight:
            request.release()

    def _reap(self) -> bool:
        moved = False
        while self._inflight and self._inflight[0][0].poll() != IN_PROGRESS:
            _, nbytes, kept = self._inflight.popleft()
            self._inflight_nbytes -= nbytes
            self._give_back(kept)
            moved = True
        return moved

    def _give_back(self, kept: object) -> None:
        if isinstance(kept, ctypes.Array):
            self._spare.append(kept)
        elif isinstance(kept, int) and self._source.staging is not None:
            self._source.staging.give_back(kept)

    def _send_some(self, pieces: _Columns) -> bool:
        """Send the next message of the head of the queue. False: its staging is full of messages that are on their way."""
        first = self._position
        staged = self._source.staging if pieces.lease_id != PROBE_LEASE else None
        slot = staged.take() if staged is not None else None
        if staged is not None and slot is None:
            return False
        nbytes = pieces.sizes[first]
        end = first + 1
        if (self._source.can_gather or staged is not None) and nbytes < PACK_NBYTES // 2:
            while end < len(pieces.sizes) and end - first < MAX_PIECES and nbytes + pieces.sizes[end] <= PACK_NBYTES:
                nbytes += pieces.sizes[end]
                end += 1
        table = [0] * (2 * (end - first))
        table[0::2] = pieces.remote[first:end]
        table[1::2] = pieces.sizes[first:end]
        header = encode_data_header(self._token, pieces.lease_id, pieces.epoch, self._stream, table)
        base = self._source.scratch_address if pieces.lease_id == PROBE_LEASE else self._source.pool_address
        staging: object = slot
        if staged is not None and slot is not None:
            address = slot
            staged.gather(slot, zip((base + offset for offset in pieces.local[first:end]), pieces.sizes[first:end], strict=True))
        elif end - first == 1:
            address = base + pieces.local[first]
        else:
            staging = buffer = self._spare.pop() if self._spare else ctypes.create_string_buffer(PACK_NBYTES)
            address = position = ctypes.addressof(buffer)
            for offset, size in zip(pieces.local[first:end], pieces.sizes[first:end], strict=True):
                ctypes.memmove(position, base + offset, size)
                position += size
        request = self._endpoint.send(Channel.DATA, header, address, nbytes)
        self._num_messages += 1
        if request.poll() == IN_PROGRESS:
            self._inflight.append((request, nbytes, staging))
            self._inflight_nbytes += nbytes
        else:
            self._give_back(staging)
        if pieces.lease_id != PROBE_LEASE:
            self.num_bytes += nbytes
            self.num_writes += end - first
        if end == len(pieces.sizes):
            self._queue.popleft()
            self._position = 0
        else:
            self._position = end
        return True


class Inbound:
    """The target's side of one session: what has been handled, and which flushes wait for how much."""

    __slots__ = ("_num_handled", "_num_violations", "_stream", "_waiting")

    def __init__(self) -> None:
        self._stream = 0
        self._num_handled = 0
        self._num_violations = 0
        self._waiting: list[FlushRequest] = []

    def handled(self, stream: int, is_violation: bool) -> None:
        """A message landed, or was stale, or broke the window of a live lease (somebody waits for those bytes)."""
        if stream > self._stream:
            self._stream, self._num_handled, self._num_violations = stream, 0, 0
        if stream == self._stream:
            self._num_handled += 1
            self._num_violations += is_violation

    def on_flush(self, request: FlushRequest) -> None:
        self._waiting.append(request)

    def replies(self) -> list[FlushReply]:
        """Answers to the flushes whose messages have all been handled."""
        if not self._waiting:
            return []
        waiting = [request for request in self._waiting if request.stream >= self._stream and not self._is_answered(request)]
        ready = [request for request in self._waiting if self._is_answered(request)]
        self._waiting = waiting
        answers = []
        for request in ready:
            answers.append(FlushReply(request.seq, self._num_violations))
            self._num_violations = 0
        return answers

    def _is_answered(self, request: FlushRequest) -> bool:
        if request.num_messages == 0:
            return True
        return request.stream == self._stream and request.num_messages <= self._num_handled
