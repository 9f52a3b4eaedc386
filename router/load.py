"""Load of each worker in tokens, counted when a request is sent there and not when the worker reports it. Used by the dispatcher only.

Open sent ---- Reserved ---- next Load of decode        uncovered until here: the report cannot know of it yet
Prefill sent ---- first Load later than REPORT_LAG_S    uncovered until here
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_serve.ids import PeerId
from pd_serve.protocol.link import Load
from router.policy.base import WorkerView
from router.pool import LinkedWorker

REPORT_LAG_S = 0.05
"""A Load that arrives this long after a Prefill was sent tells of it."""


@dataclass(slots=True)
class _Charge:
    num_tokens: int
    told_at: float | None = None
    """When the worker certainly had been told (decode: Reserved arrived; prefill: Prefill sent)."""
    is_covered: bool = False


@dataclass(slots=True)
class _Worker:
    prefill: dict[int, _Charge] = field(default_factory=dict)
    decode: dict[int, _Charge] = field(default_factory=dict)
    has_refused: bool = False
    """It refused for want of room, and has not reported since."""


class LoadBook:
    """Charges by peer and by a key of the caller's (one per choice)."""

    def __init__(self) -> None:
        self._workers: dict[PeerId, _Worker] = {}

    def charge(self, key: int, prefill: PeerId | None, decode: PeerId, num_tokens: int) -> None:
        """A request was assigned. A prompt computed by the decode worker counts as prefill there."""
        self._worker(decode).decode[key] = _Charge(num_tokens)
        self._worker(prefill or decode).prefill[key] = _Charge(num_tokens)

    def told(self, key: int, peer: PeerId, now: float) -> None:
        """The worker has been told (decode: it has answered Reserved; prefill: Prefill was sent)."""
        worker = self._worker(peer)
        for charge in (worker.prefill.get(key), worker.decode.get(key)):
            if charge is not None:
                charge.told_at = now

    def prefilled(self, key: int, peer: PeerId) -> None:
        """The prompt is computed. Idempotent."""
        self._worker(peer).prefill.pop(key, None)

    def release(self, key: int, peers: tuple[PeerId, ...]) -> None:
        """The request left these workers. Idempotent."""
        for peer in peers:
            worker = self._workers.get(peer)
            if worker is not None:
                worker.prefill.pop(key, None)
                worker.decode.pop(key, None)

    def refused(self, peer: PeerId) -> None:
        """No room there until its next report."""
        self._worker(peer).has_refused = True

    def reported(self, peer: PeerId, now: float) -> None:
        worker = self._worker(peer)
        worker.has_refused = False
        for charge in worker.decode.values():
            charge.is_covered = charge.is_covered or charge.told_at is not None
        for charge in worker.prefill.values():
            charge.is_covered = charge.is_covered or (charge.told_at is not None and now - charge.told_at > REPORT_LAG_S)

    def forget(self, peer: PeerId) -> None:
        self._workers.pop(peer, None)

    def prefill_backlog_tokens(self, peer: PeerId, load: Load) -> int:
        """What the worker reports and what it cannot know yet, but never more than our own unless other routers send there too."""
        charges = self._worker(peer).prefill.values()
        own = sum(charge.num_tokens for charge in charges)
        uncovered = sum(charge.num_tokens for charge in charges if not charge.is_covered)
        return max(load.prefill_queue_tokens, min(own, load.prefill_queue_tokens + uncovered))

    def decode_tokens(self, peer: PeerId, load: Load) -> int:
        charges = self._worker(peer).decode.values()
        own = sum(charge.num_tokens for charge in charges)
        uncovered = sum(charge.num_tokens for charge in charges if not charge.is_covered)
        return max(own, load.decode_context_tokens + uncovered)

    def num_sequences(self, peer: PeerId, load: Load) -> int:
        return max(len(self._worker(peer).decode), load.running + load.waiting)

    def free_tokens(self, peer: PeerId, load: Load, block_size: int) -> int:
        """Rounds every uncovered request up to whole blocks."""
        worker = self._worker(peer)
        if worker.has_refused:
            return 0
        uncovered = sum(-(-(charge.num_tokens + 1) // block_size) for charge in worker.decode.values() if not charge.is_covered)
        return (load.blocks.free + load.blocks.cached - uncovered) * block_size

    def view(self, worker: LinkedWorker, is_joining: bool) -> WorkerView:
        """The worker as a policy sees it."""
        peer, load = worker.peer, worker.load
        return WorkerView(
            peer=peer,
            role=load.role,
            max_model_len=worker.welcome.max_model_len,
            num_pool_tokens=worker.num_pool_tokens,
            num_free_tokens=self.free_tokens(peer, load, worker.welcome.info.layout.block_size),
            prefill_backlog_tokens=self.prefill_backlog_tokens(peer, load),
            decode_tokens=self.decode_tokens(peer, load),
            num_sequences=self.num_sequences(peer, load),
            joined=worker.joined,
            is_joining=is_joining,
        )

    def is_empty(self) -> bool:
        return not any(worker.prefill or worker.decode for worker in self._workers.values())

    def _worker(self, peer: PeerId) -> _Worker:
        worker = self._workers.get(peer)
        if worker is None:
            worker = self._workers[peer] = _Worker()
        return worker
