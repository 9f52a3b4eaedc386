"""Any transport, made worse: seeded delay, loss, reordering and duplication of notices, throttling, cuts, stalls, failing flushes.

For tests and the simulator. Wraps another transport; what is to be late waits here, per peer and in order, until progress() finds it due on
the injected clock. The random choices of a peer depend on the seed, its worker id and its own operations only, so a failing seed replays.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pd_serve.clock import Clock, MonotonicClock
from pd_serve.errors import OutOfBoundsError
from pd_serve.ids import LeaseId, PeerId
from pd_serve.transport.base import (
    EventSink,
    Flushed,
    NoticeReceived,
    PeerFenced,
    PeerJoined,
    PeerLost,
    Region,
    TransportCounters,
    TransportEvent,
    TransportSettings,
    WriteBatch,
    WriteWindow,
)
from pd_serve.transport.fault_plan import FaultPlan, plan_from_environment
from pd_serve.transport.registry import TransportFactory, transport_factory
from pd_serve.transport.windows import check_bounds

_UNKNOWN_NBYTES = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    batch: WriteBatch


@dataclass(frozen=True, slots=True)
class _Flush:
    token: int


@dataclass(frozen=True, slots=True)
class _Notice:
    payload: bytes


@dataclass(slots=True)
class _Held:
    due: float
    operation: _Write | _Flush | _Notice


@dataclass(slots=True)
class _Path:
    """What is on its way to one peer."""

    peer: PeerId
    random: random.Random
    queue: deque[_Held] = field(default_factory=deque)
    strays: list[_Held] = field(default_factory=list)
    """Held on their own: overtaken notices, late writes."""
    free_at: float = 0.0
    """When the throttled link has sent all that was given to it."""
    last_due: float = 0.0
    is_stalled: bool = False
    is_cut: bool = False
    cut_at: float | None = None
    fenced_at: float | None = None
    has_bad_write: bool = False
    """A held write turned out to be outside the peer's pool."""
    asked: set[int] = field(default_factory=set)
    """Flushes that the inner transport has yet to answer."""


class FaultyTransport:
    """See base.Transport. `cut`, `stall` and `resume` are for tests that choose the moment; owner thread only.

    One liberty: a write that is held back is checked against the local pool at once, but against the peer's when it is its turn; if it is
    out of bounds then, it is not issued and the peer's next flush fails.
    """

    name = "faulty"

    def __init__(
        self,
        settings: TransportSettings,
        sink: EventSink,
        plan: FaultPlan | None = None,
        inner: TransportFactory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._plan = plan if plan is not None else plan_from_environment()
        self._sink = sink
        self._clock = clock if clock is not None else MonotonicClock()
        self._inner = (inner if inner is not None else transport_factory(self._plan.inner))(settings, self._on_event)
        self._paths: dict[PeerId, _Path] = {}
        self._failing_tokens: set[int] = set()
        self._ready: deque[TransportEvent] = deque()
        self._local_nbytes = 0
        self._closed = False

    # ---- faults on demand

    def cut(self, peer: PeerId, fenced_after_s: float = 0.0) -> None:
        """Lose the peer now. Until it is fenced its one-sided writes still land here; nothing else passes either way."""
        path = self._path(peer)
        if path.is_cut:
            return
        path.is_cut = True
        path.cut_at = None
        self._fail_flushes(path, f"{peer} was cut off")
        if fenced_after_s > 0:
            path.fenced_at = self._clock.now() + fenced_after_s
        else:
            self._inner.remove_peer(peer)
        self._ready.append(PeerLost(peer, "cut off", fenced=fenced_after_s <= 0))

    def stall(self, peer: PeerId) -> None:
        """Hold back everything that goes to the peer, as a stopped process would."""
        self._path(peer).is_stalled = True

    def resume(self, peer: PeerId) -> None:
        self._path(peer).is_stalled = False

    # ---- pool

    def allocate_pool(self, nbytes: int) -> Region:
        self._local_nbytes = nbytes
        return self._inner.allocate_pool(nbytes)

    def register_pool(self, address: int, nbytes: int, device: str) -> Region:
        self._local_nbytes = nbytes
        return self._inner.register_pool(address, nbytes, device)

    def export_metadata(self) -> bytes:
        return self._inner.export_metadata()

    # ---- peers

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        path = self._paths.get(peer)
        if path is not None and path.is_cut:
            self.remove_peer(peer)
        self._inner.add_peer(peer, metadata)

    def remove_peer(self, peer: PeerId) -> None:
        self._inner.remove_peer(peer)
        path = self._paths.pop(peer, None)
        self._ready = deque(event for event in self._ready if isinstance(event, Flushed) or event.peer != peer)
        if path is not None:
            self._fail_flushes(path, "peer removed")

    def hard_fence(self, peer: PeerId) -> bool:
        return self._inner.hard_fence(peer)

    # ---- operations

    def write(self, batch: WriteBatch) -> None:
        path = self._path(batch.peer)
        nbytes = check_bounds(batch.ops, self._local_nbytes, _UNKNOWN_NBYTES)
        if path.is_cut:
            return
        if self._hits(path, self._plan.late_write):
            path.strays.append(_Held(self._clock.now() + self._plan.late_write_s, _Write(batch)))
            return
        self._enqueue(path, _Write(batch), nbytes)

    def flush(self, peer: PeerId, token: int) -> None:
        path = self._path(peer)
        if path.is_cut:
            self._ready.append(Flushed(token, False, f"{peer} was cut off"))
            return
        path.asked.add(token)
        if self._hits(path, self._plan.flush_failure):
            self._failing_tokens.add(token)
        self._enqueue(path, _Flush(token), 0)

    def notify(self, peer: PeerId, payload: bytes) -> None:
        path = self._path(peer)
        if path.is_cut or self._hits(path, self._plan.notice_loss):
            return
        for _ in range(2 if self._hits(path, self._plan.notice_duplicate) else 1):
            if self._hits(path, self._plan.notice_reorder):
                path.strays.append(_Held(self._clock.now() + self._plan.reorder_s, _Notice(payload)))
            else:
                self._enqueue(path, _Notice(payload), 0)

    def open_window(self, window: WriteWindow) -> None:
        self._inner.open_window(window)

    def close_window(self, lease_id: LeaseId) -> bool:
        return self._inner.close_window(lease_id)

    # ---- progress

    def progress(self) -> bool:
        happened = self._inner.progress()
        now = self._clock.now()
        for peer, path in tuple(self._paths.items()):
            happened |= self._release_due(path, now)
            if path.cut_at is not None and now >= path.cut_at:
                self.cut(peer, self._plan.cut_fenced_after_s)
            if path.fenced_at is not None and now >= path.fenced_at:
                path.fenced_at = None
                self._inner.remove_peer(peer)
                self._ready.append(PeerFenced(peer))
        happened |= bool(self._ready)
        while self._ready and not self._closed:
            self._sink(self._ready.popleft())
        return happened

    def busy(self) -> bool:
        now = self._clock.now()
        return self._inner.busy() or bool(self._ready) or any(due <= now for due in self._due_times())

    def arm(self) -> bool:
        return self._inner.arm() and not self.busy()

    def wait_fds(self) -> tuple[int, ...]:
        return self._inner.wait_fds()

    def next_deadline(self) -> float | None:
        inner = self._inner.next_deadline()
        return min((*self._due_times(), *(() if inner is None else (inner,))), default=None)

    def lanes(self) -> tuple[str, ...]:
        return self._inner.lanes()

    def counters(self) -> TransportCounters:
        return self._inner.counters()

    def close(self) -> None:
        self._closed = True
        self._paths.clear()
        self._ready.clear()
        self._inner.close()

    # ---- holding back

    def _path(self, peer: PeerId) -> _Path:
        if peer not in self._paths:
            self._paths[peer] = _Path(peer, random.Random(f"{self._plan.seed}/{peer.worker_id}"))
        return self._paths[peer]

    def _hits(self, path: _Path, probability: float) -> bool:
        return probability > 0 and path.random.random() < probability

    def _enqueue(self, path: _Path, operation: _Write | _Flush | _Notice, nbytes: int) -> None:
        now = self._clock.now()
        least, most = self._plan.delay_s
        due = max(path.last_due, now + (path.random.uniform(least, most) if most > 0 else 0.0))
        if self._plan.bandwidth > 0:
            path.free_at = max(path.free_at, due) + nbytes / self._plan.bandwidth
            due = max(due, path.free_at)
        path.last_due = due
        if not path.queue and not path.is_stalled and due <= now:
            self._issue(path, operation)
        else:
            path.queue.append(_Held(due, operation))

    def _release_due(self, path: _Path, now: float) -> bool:
        if path.is_stalled or path.is_cut:
            return False
        due_strays = [held for held in path.strays if held.due <= now]
        if due_strays:
            path.strays = [held for held in path.strays if held.due > now]
        released = due_strays
        while path.queue and path.queue[0].due <= now:
            released.append(path.queue.popleft())
        for held in released:
            try:
                self._issue(path, held.operation)
            except OutOfBoundsError:
                path.has_bad_write = True
        return bool(released)

    def _issue(self, path: _Path, operation: _Write | _Flush | _Notice) -> None:
        match operation:
            case _Write(batch):
                self._inner.write(batch)
            case _Flush(token):
                if path.has_bad_write:
                    path.has_bad_write = False
                    self._failing_tokens.add(token)
                self._inner.flush(path.peer, token)
            case _Notice(payload):
                self._inner.notify(path.peer, payload)

    def _due_times(self) -> Iterator[float]:
        for path in self._paths.values():
            if path.cut_at is not None:
                yield path.cut_at
            if path.fenced_at is not None:
                yield path.fenced_at
            if not path.is_stalled and not path.is_cut:
                yield from (held.due for held in path.strays)
                if path.queue:
                    yield path.queue[0].due

    def _fail_flushes(self, path: _Path, detail: str) -> None:
        path.queue.clear()
        path.strays.clear()
        self._ready.extend(Flushed(token, False, detail) for token in sorted(path.asked))
        path.asked.clear()

    # ---- events of the inner transport

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, Flushed):
            self._on_flushed(event)
            return
        path = self._path(event.peer)
        if path.is_cut:
            return
        if isinstance(event, PeerJoined):
            cut_after_s = dict(self._plan.cut_after_s).get(event.peer.worker_id)
            path.cut_at = None if cut_after_s is None else self._clock.now() + cut_after_s
        elif not isinstance(event, NoticeReceived):
            self._fail_flushes(path, f"{event.peer} is gone")
            while self._ready:
                self._sink(self._ready.popleft())
            path.cut_at = None
        self._sink(event)

    def _on_flushed(self, event: Flushed) -> None:
        is_failing = event.token in self._failing_tokens
        self._failing_tokens.discard(event.token)
        for path in self._paths.values():
            if event.token in path.asked:
                path.asked.discard(event.token)
                self._sink(Flushed(event.token, False, "planted failure") if is_failing else event)
                return
