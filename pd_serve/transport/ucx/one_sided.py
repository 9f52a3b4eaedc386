"""Puts straight into the peer's memory: shared memory that UCX allocated, RDMA.

Delivered means: the flush returned OK, the endpoint has not failed, and the peer's process (where it can be seen) still lives at that
moment. UCX completes queued puts and the flush with OK when the target has closed its side by force, and a put into the shared memory of
a dead process succeeds too.

On shared memory a put is a copy made inside the call, and where the library tells where it has mapped the peer's memory the copy is made
here (mapped.py); `pump` therefore issues at most MAX_PUMP_NBYTES at a time, so that one long batch does not keep other peers waiting. On
RDMA puts are queued by UCX; at most MAX_UNFLUSHED_PUTS are out before a flush has to catch up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pd_serve.transport.ucx.mapped import MappedMemory
from pd_serve.transport.ucx.messages import PROBE_LEASE
from pd_serve.transport.ucx.seam import IN_PROGRESS, OK, Endpoint, Memory, RemoteKey, Request
from pd_serve.transport.ucx.writer import MAX_PIECE_NBYTES, Completion, Pieces, cut, whole

MAX_PUMP_NBYTES = 4 * 1024 * 1024
MAX_COPY_NBYTES = 1024 * 1024
"""Of one piece that is copied here."""
MAX_UNFLUSHED_PUTS = 8192


class Side:
    """One memory as a source here and one as a target there."""

    __slots__ = ("key", "local_base", "mapped", "memory", "remote_base")

    def __init__(
        self, local_base: int, memory: Memory | None, remote_base: int, key: RemoteKey, mapped: MappedMemory | None = None
    ) -> None:
        self.local_base = local_base
        self.memory = memory
        self.remote_base = remote_base
        self.key = key
        self.mapped = mapped
        """Both memories as this process sees them, where it does."""


class OneSidedWriter:
    def __init__(self, endpoint: Endpoint, pool: Side, scratch: Side, is_alive: Callable[[], bool]) -> None:
        self._endpoint = endpoint
        self._pool = pool
        self._scratch = scratch
        self._is_alive = is_alive
        self._queue: deque[tuple[Side, NDArray[np.int64]] | int] = deque()
        self._flushes: deque[tuple[int | None, Request, int]] = deque()
        self._num_unflushed = 0
        self._num_issued = 0
        self._completions: list[Completion] = []
        self._unpopulated = pool.mapped
        """What has pages left to be populated, while nothing else is to be done."""
        self.num_bytes = 0
        self.num_writes = 0

    def write(self, pieces: Pieces) -> None:
        limit = MAX_PIECE_NBYTES if self._pool.mapped is None else MAX_COPY_NBYTES
        self._queue.append((self._pool, cut(pieces, limit).ops))

    def probe(self, nbytes: int) -> None:
        self._queue.append((self._scratch, cut(whole(PROBE_LEASE, nbytes), 64 * 1024).ops))

    def flush(self, token: int) -> None:
        self._queue.append(token)

    def pump(self) -> bool:
        budget = MAX_PUMP_NBYTES
        moved = False
        while self._queue and budget > 0:
            head = self._queue[0]
            if isinstance(head, int):
                self._queue.popleft()
                self._start_flush(head)
            elif self._num_unflushed >= MAX_UNFLUSHED_PUTS:
                if not self._flushes:
                    self._start_flush(None)
                break  # until the flush under way has caught up
            else:
                self._queue.popleft()
                budget -= self._issue(*head, budget)
            moved = True
        moved |= self._collect()
        if not moved and self._unpopulated is not None:
            self._unpopulated.populate()
            self._unpopulated = None if self._unpopulated.is_populated else self._unpopulated
            moved = True
        return moved

    def take_completions(self) -> list[Completion]:
        completions, self._completions = self._completions, []
        return completions

    @property
    def is_pending(self) -> bool:
        return bool(self._queue or self._flushes or self._unpopulated)

    def abort(self, detail: str) -> None:
        pending = [token for token, _, _ in self._flushes if token is not None] + [item for item in self._queue if isinstance(item, int)]
        self._queue.clear()
        for _, request, _ in self._flushes:
            request.release()
        self._flushes.clear()
        self._unpopulated = None
        self._completions += [Completion(token, False, detail) for token in pending]

    def close(self) -> None:
        self.abort("closed")
        for side in (self._pool, self._scratch):
            if side.mapped is not None:
                side.mapped.close()
                side.mapped = None
        self._pool.key.close()
        self._scratch.key.close()

    def _issue(self, side: Side, ops: NDArray[np.int64], budget: int) -> int:
        """Issue a prefix of the pieces; the rest goes back to the front of the queue. Returns the bytes issued."""
        count, nbytes = len(ops), int(ops[:, 2].sum())
        if nbytes > budget or count > MAX_UNFLUSHED_PUTS:
            count, nbytes = _prefix(ops[:, 2], budget)
            if count < len(ops):
                self._queue.appendleft((side, ops[count:]))
            ops = ops[:count]
        if side.mapped is None:
            self._put(side, ops)
        elif self._endpoint.failure is None:
            side.mapped.write(ops)
        if side is self._pool:
            self.num_bytes += nbytes
            self.num_writes += count
        return nbytes

    def _put(self, side: Side, ops: NDArray[np.int64]) -> None:
        local, remote, sizes = ops.T.tolist()
        sources, targets = [side.local_base + offset for offset in local], [side.remote_base + offset for offset in remote]
        num_queued = self._endpoint.put(sources, targets, sizes, side.key, side.memory)
        self._num_unflushed += num_queued
        self._num_issued += num_queued

    def _start_flush(self, token: int | None) -> None:
        self._flushes.append((token, self._endpoint.flush(), self._num_issued))
        self._num_issued = 0

    def _collect(self) -> bool:
        moved = False
        while self._flushes:
            token, request, num_puts = self._flushes[0]
            status = request.poll()
            if status == IN_PROGRESS:
                break
            self._flushes.popleft()
            self._num_unflushed -= num_puts
            moved = True
            if token is None:
                continue
            if status != OK or self._endpoint.failure is not None:
                self._completions.append(Completion(token, False, self._endpoint.failure or f"flush failed ({status})"))
            elif not self._is_alive():
                self._completions.append(Completion(token, False, "the peer's process has ended"))
            else:
                self._completions.append(Completion(token, True, ""))
        return moved


def _prefix(sizes: NDArray[np.int64], budget: int) -> tuple[int, int]:
    """(pieces, bytes) of the shortest prefix that uses the budget up, of at most MAX_UNFLUSHED_PUTS pieces."""
    sums = np.cumsum(sizes[:MAX_UNFLUSHED_PUTS])
    count = min(int(np.searchsorted(sums, budget)) + 1, len(sums))
    return count, int(sums[count - 1])
