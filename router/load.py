"""Load of each worker in tokens, counted when a request is sent there and not when the worker reports it. Used by the dispatcher only.

Open sent ---- Reserved ---- next Load of decode        uncovered until here: the report cannot know of it yet
Prefill sent ---- first Load later than REPORT_LAG_S    uncovered until here

A prompt's tokens are counted off when it is computed (PrefillDone, first token, or a report of an empty queue that must know of it), a
sequence's when it leaves, off the last report as well, if that may know of it: else a worker that is full would stand idle until its next
one. A worker that has not reported for long is marked: what it last said is no longer known.

Sums are kept, not made: a look at a worker costs the same however many requests it has, and a report only what it covers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pd_serve.ids import PeerId
from pd_serve.protocol.link import Load, PeerStatus
from router.linked_worker import LinkedWorker
from router.policy.base import WorkerView

REPORT_LAG_S = 0.05
"""A Load that arrives this long after a Prefill was sent tells of it."""


@dataclass(slots=True)
class _Charge:
    num_tokens: int
    told_at: float | None = None
    """When the worker certainly had been told (decode: Reserved arrived; prefill: Prefill sent)."""
    may_be_reported: bool = False
    """A report has come since: where it is too soon to say that it knows, it may."""


class _Charges:
    """What one worker was sent in one role, by key of the choice."""

    def __init__(self, short_tokens: int) -> None:
        self._short_tokens = short_tokens
        self._charges: dict[int, _Charge] = {}
        self._uncovered: dict[int, _Charge] = {}
        self._block_size = 0
        self._num_uncovered_blocks = 0
        self.num_tokens = 0
        self.num_short_tokens = 0
        """Of those of at most `short_tokens`."""
        self.num_uncovered_tokens = 0
        self.num_ended = 0
        """Since the last report, of those that it knows of: it counts them yet."""
        self.num_ended_tokens = 0

    def __len__(self) -> int:
        return len(self._charges)

    def add(self, key: int, num_tokens: int) -> None:
        self.pop(key)
        self._charges[key] = self._uncovered[key] = _Charge(num_tokens)
        self._count(num_tokens, 1)
        self._count_uncovered(num_tokens, 1)

    def pop(self, key: int) -> bool:
        """False: it was not here."""
        charge = self._charges.pop(key, None)
        if charge is None:
            return False
        self._count(charge.num_tokens, -1)
        is_uncovered = self._uncovered.pop(key, None) is not None
        if is_uncovered:
            self._count_uncovered(charge.num_tokens, -1)
        if charge.may_be_reported or not is_uncovered:
            self.num_ended += 1
            self.num_ended_tokens += charge.num_tokens
        return True

    def told(self, key: int, now: float) -> None:
        charge = self._charges.get(key)
        if charge is not None:
            charge.told_at = now

    def cover(self, told_before: Callable[[float], bool]) -> None:
        """A report has come that knows of what was told at such a time."""
        self.num_ended = self.num_ended_tokens = 0
        known = [key for key, charge in self._uncovered.items() if charge.told_at is not None and told_before(charge.told_at)]
        for key in known:
            self._count_uncovered(self._uncovered.pop(key).num_tokens, -1)
        for charge in self._uncovered.values():
            charge.may_be_reported = charge.told_at is not None

    def drop_covered(self) -> None:
        """The report says that nothing is left of what it knows of."""
        if len(self._charges) > len(self._uncovered):
            for key in self._charges.keys() - self._uncovered.keys():
                self.pop(key)
            self.num_ended = self.num_ended_tokens = 0

    def num_uncovered_blocks(self, block_size: int) -> int:
        """Every uncovered request rounded up to whole blocks, with room for a token more."""
        if block_size != self._block_size:
            self._block_size = block_size
            self._num_uncovered_blocks = sum(self._num_blocks(charge.num_tokens) for charge in self._uncovered.values())
        return self._num_uncovered_blocks

    def _count(self, num_tokens: int, sign: int) -> None:
        self.num_tokens += sign * num_tokens
        if num_tokens <= self._short_tokens:
            self.num_short_tokens += sign * num_tokens

    def _count_uncovered(self, num_tokens: int, sign: int) -> None:
        self.num_uncovered_tokens += sign * num_tokens
        if self._block_size:
            self._num_uncovered_blocks += sign * self._num_blocks(num_tokens)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-(num_tokens + 1) // self._block_size)


@dataclass(slots=True)
class _Worker:
    prefill: _Charges
    decode: _Charges
    has_refused: bool = False
    """It refused for want of room, and has not reported since."""
    reported_at: float | None = None
    """Monotonic seconds; None: it has just been linked."""
    view: WorkerView | None = None
    """As last made, until something here changes."""
    load: Load | None = None
    """It was made of."""
    peer_status: PeerStatus | None = None
    bandwidths: Mapping[PeerId, float] = field(default_factory=dict)
    """As `peer_status` says."""
    kv_bytes_per_token: int = 0
    """0: not asked yet; it never changes."""


class LoadBook:
    """Charges by peer and by a key of the caller's (one per choice)."""

    def __init__(self, short_tokens: int = 0) -> None:
        """`short_tokens`: as RoutingSettings.short_prompt_tokens."""
        self._short_tokens = short_tokens
        self._workers: dict[PeerId, _Worker] = {}
        self._reported: dict[PeerId, float] = {}
        """When each reported, the longest ago first, without those of which fell_silent() has told."""
        self.changed: set[PeerId] = set()
        """Workers that may look otherwise than at the last look: the roster's, which empties it."""

    def charge(self, key: int, prefill: PeerId | None, decode: PeerId, num_tokens: int, num_to_compute: int | None = None) -> None:
        """A request was assigned. A prompt computed by the decode worker counts as prefill there. `num_to_compute`: what the worker that
        computes it has not cached; None: all.
        """
        self._changed(decode).decode.add(key, num_tokens)
        self._changed(prefill or decode).prefill.add(key, num_tokens if num_to_compute is None else num_to_compute)

    def told(self, key: int, peer: PeerId, now: float) -> None:
        """The worker has been told (decode: it has answered Reserved; prefill: Prefill was sent)."""
        worker = self._workers.get(peer)
        if worker is not None:
            worker.prefill.told(key, now)
            worker.decode.told(key, now)

    def prefilled(self, key: int, peer: PeerId) -> None:
        """The prompt is computed. Idempotent, also of a worker that is gone."""
        worker = self._workers.get(peer)
        if worker is not None and worker.prefill.pop(key):
            self._changed(peer)

    def release(self, key: int, peers: tuple[PeerId, ...]) -> None:
        """The request left these workers. Idempotent."""
        for peer in peers:
            worker = self._workers.get(peer)
            if worker is not None and worker.prefill.pop(key) | worker.decode.pop(key):
                self._changed(peer)

    def refused(self, peer: PeerId) -> None:
        """No room there until its next report. Nothing, of a worker that is gone."""
        worker = self._workers.get(peer)
        if worker is not None:
            self._changed(peer)
            worker.has_refused = True

    def reported(self, peer: PeerId, now: float, is_queue_empty: bool = False) -> None:
        """`is_queue_empty`: it has nothing left to compute of what it had been told in time."""
        worker = self._changed(peer)
        worker.reported_at = now
        self._reported.pop(peer, None)
        self._reported[peer] = now
        worker.has_refused = False
        worker.decode.cover(lambda told_at: True)
        worker.prefill.cover(lambda told_at: now - told_at > REPORT_LAG_S)
        if is_queue_empty:
            worker.prefill.drop_covered()

    def fell_silent(self, stale_before: float) -> list[PeerId]:
        """Workers whose reports have become older than that moment, each once. Takes time in their number."""
        silent: list[PeerId] = []
        for peer, reported_at in self._reported.items():
            if reported_at >= stale_before:
                break
            silent.append(peer)
        for peer in silent:
            del self._reported[peer]
        return silent

    def forget(self, peer: PeerId) -> None:
        self._workers.pop(peer, None)
        self._reported.pop(peer, None)
        self.changed.discard(peer)

    def prefill_backlog_tokens(self, peer: PeerId, load: Load) -> int:
        """What the worker reports and what it cannot know yet, but never more than our own unless other routers send there too."""
        return _backlog_tokens(self._worker(peer), load)

    def decode_tokens(self, peer: PeerId, load: Load) -> int:
        return _decode_tokens(self._worker(peer), load)

    def num_sequences(self, peer: PeerId, load: Load) -> int:
        return _num_sequences(self._worker(peer), load)

    def free_tokens(self, peer: PeerId, load: Load, block_size: int) -> int:
        """Rounds every uncovered request up to whole blocks."""
        return _free_tokens(self._worker(peer), load, block_size)

    def view(
        self, worker: LinkedWorker, is_joining: bool, prefill_tokens_per_s: float = 1.0, stale_before: float = float("-inf")
    ) -> WorkerView:
        """The worker as a policy sees it; the same object for as long as it would look the same. `stale_before`: reports older than that
        moment tell nothing of now.
        """
        known = self._worker(worker.peer)
        is_stale = known.reported_at is not None and known.reported_at < stale_before
        view = known.view
        if (
            view is None
            or known.load is not worker.load
            or known.peer_status is not worker.peer_status
            or view.joined is not worker.joined
            or view.is_joining is not is_joining
            or view.is_stale is not is_stale
            or view.prefill_tokens_per_s != prefill_tokens_per_s
        ):
            known.load = worker.load
            if known.peer_status is not worker.peer_status:
                known.peer_status = worker.peer_status
                known.bandwidths = {state.peer: state.bandwidth for state in worker.peer_status.states}
            view = known.view = self._new_view(worker, known, is_joining, prefill_tokens_per_s, is_stale)
        return view

    def _new_view(self, worker: LinkedWorker, known: _Worker, is_joining: bool, prefill_tokens_per_s: float, is_stale: bool) -> WorkerView:
        load, info = worker.load, worker.welcome.info
        layout = info.layout
        if not known.kv_bytes_per_token:
            known.kv_bytes_per_token = layout.bytes_per_token * info.num_ranks
        return WorkerView(  # by position, which takes a fifth of the time
            worker.peer,
            load.role,
            worker.welcome.max_model_len,
            worker.num_pool_tokens,
            _free_tokens(known, load, layout.block_size),
            _backlog_tokens(known, load),
            _decode_tokens(known, load),
            _num_sequences(known, load),
            worker.joined,
            is_joining,
            known.prefill.num_short_tokens,
            prefill_tokens_per_s,
            known.kv_bytes_per_token,
            layout.num_layers,
            known.bandwidths,
            is_stale,
        )

    def is_empty(self) -> bool:
        return not any(len(worker.prefill) or len(worker.decode) for worker in self._workers.values())

    def _worker(self, peer: PeerId) -> _Worker:
        worker = self._workers.get(peer)
        if worker is None:
            worker = self._workers[peer] = _Worker(_Charges(self._short_tokens), _Charges(self._short_tokens))
        return worker

    def _changed(self, peer: PeerId) -> _Worker:
        """The worker, which will look otherwise."""
        worker = self._worker(peer)
        worker.view = None
        self.changed.add(peer)
        return worker


def _backlog_tokens(worker: _Worker, load: Load) -> int:
    charges, reported = worker.prefill, load.prefill_queue_tokens
    if charges.num_ended:  # of which it may have told a part only: what else it knows of is not less for that
        num_known = charges.num_tokens - charges.num_uncovered_tokens
        reported = max(reported - charges.num_ended_tokens, min(reported, num_known))
    return max(reported, min(charges.num_tokens, reported + charges.num_uncovered_tokens))


def _decode_tokens(worker: _Worker, load: Load) -> int:
    charges = worker.decode
    reported = max(0, load.decode_context_tokens - charges.num_ended_tokens)
    return max(charges.num_tokens, reported + charges.num_uncovered_tokens)


def _num_sequences(worker: _Worker, load: Load) -> int:
    return max(len(worker.decode), load.running + load.waiting - worker.decode.num_ended)


def _free_tokens(worker: _Worker, load: Load, block_size: int) -> int:
    if worker.has_refused:
        return 0
    return (load.blocks.free + load.blocks.cached - worker.decode.num_uncovered_blocks(block_size)) * block_size
