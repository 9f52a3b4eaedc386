"""The workers that take requests, as policies see them now: a standing table, of which each look changes only what has changed since the
last. Used by assignment.py only.

What changes it                                       how it is heard of
    a report, joins, a role, draining, leaving        LinkedWorker.watchers
    charges, releases, refusals, reports              LoadBook.changed
    speeds                                            Throughput.changed; all, when the usual speed moves a step
    a join's time of grace is over, no report came    by time: those that are next are looked at
    links come and go                                 another tuple of the pool's

A few workers are a tuple of views; from MANY on they are columns (policy/columns.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import is_

import msgspec

from pd_serve.ids import PeerId
from router.linked_worker import LinkedWorker
from router.load import LoadBook
from router.policy.base import Leg, WorkerView
from router.policy.chooser import RouteChooser
from router.policy.columns import Columns, WorkerTable
from router.pool import WorkerPool
from router.throughput import Throughput

MANY = 40
"""From so many workers on arrays are quicker than looking at one after the other."""


class Roster:
    """`now`: monotonic seconds."""

    def __init__(self, pool: WorkerPool, chooser: RouteChooser, book: LoadBook, speeds: Throughput, now: Callable[[], float]) -> None:
        self._pool = pool
        self._book = book
        self._speeds = speeds
        self._now = now
        self._stale_after_s = chooser.settings.stale_after_s
        self._reads_lanes = chooser.reads_lanes
        self._workers: tuple[LinkedWorker, ...] = ()
        self._rows: dict[PeerId, int] = {}
        self._views: list[WorkerView | None] = []
        self._columns: Columns | None = None
        self._joining: deque[LinkedWorker] = deque()
        """The first to have come first: the first whose grace ends."""
        self._changed = speeds.changed = book.changed
        self._usual_tokens_per_s = 0.0
        self._seen: Sequence[WorkerView] | None = None
        """As last looked at, until something changes."""

    def look(self) -> Sequence[WorkerView]:
        """As of now, and good until the next look. Takes time in what has changed."""
        stale_before = self._now() - self._stale_after_s
        linked = self._pool.workers
        if linked is not self._workers:
            self._arrange(linked)
        changed, book, speeds = self._changed, self._book, self._speeds
        while self._joining and not self._pool.is_joining(self._joining[0]):
            changed.add(self._joining.popleft().peer)
        if silent := book.fell_silent(stale_before):
            changed.update(silent)
        if speeds.usual_tokens_per_s != self._usual_tokens_per_s:
            self._usual_tokens_per_s = speeds.usual_tokens_per_s
            if self._columns is not None:
                self._columns.assume_speed(self._usual_tokens_per_s)
                self._seen = None
            else:
                changed.update(self._rows)
        if changed:
            for peer in changed:
                row = self._rows.get(peer)
                if row is not None:
                    self._look_at(row, stale_before)
            changed.clear()
            self._seen = None
        if self._seen is None:
            self._seen = self._few() if self._columns is None else WorkerTable(self._columns)
        return self._seen

    def _look_at(self, row: int, stale_before: float) -> None:
        worker, view = self._workers[row], None
        if worker.is_available:
            view = self._book.view(worker, self._pool.is_joining(worker), self._speeds.tokens_per_s(worker.peer), stale_before)
        self._views[row] = view
        if self._columns is not None:
            self._columns.put(row, view, self._speeds.is_measured(worker.peer))

    def _few(self) -> tuple[WorkerView, ...]:
        views = [view for view in self._views if view is not None]
        return tuple(as_worst_known(views) if any(view.is_stale for view in views) else views)

    def _arrange(self, linked: tuple[LinkedWorker, ...]) -> None:
        """Workers came or went."""
        if len(linked) == len(self._workers) and all(map(is_, linked, self._workers)):
            self._workers = linked
            return
        known = {id(worker): row for row, worker in enumerate(self._workers)}
        before = [known.get(id(worker), -1) for worker in linked]
        peers = tuple(worker.peer for worker in linked)
        new = [worker for row, worker in zip(before, linked, strict=True) if row < 0]
        for worker in new:
            worker.watchers += (self._changed.add,)
            self._changed.add(worker.peer)
        here = set(map(id, linked))
        joining = [worker for worker in self._joining if id(worker) in here] + [worker for worker in new if self._pool.is_joining(worker)]
        self._joining = deque(sorted(joining, key=lambda worker: worker.linked_at))
        self._views = [None if row < 0 else self._views[row] for row in before]
        self._rows = {peer: row for row, peer in enumerate(peers)}
        self._workers = linked
        if len(linked) < MANY:
            if self._columns is not None:
                self._columns = None
                self._changed.update(peers)  # what was assumed of their speed stands in the columns alone
        elif self._columns is None:
            self._columns = Columns(self._reads_lanes)
            self._columns.arrange(peers, [-1] * len(peers))
            self._changed.update(peers)
        else:
            self._columns.arrange(peers, before)
        self._seen = None


def as_worst_known(views: list[WorkerView]) -> list[WorkerView]:
    """Workers that have not reported for long are taken for as loaded as the most loaded of those that have: not known is not idle."""
    fresh = [view for view in views if not view.is_stale]
    backlog = max((view.load(Leg.PREFILL) for view in fresh), default=0)
    decode_tokens = max((view.decode_tokens for view in fresh), default=0)
    num_sequences = max((view.num_sequences for view in fresh), default=0)
    return [
        msgspec.structs.replace(
            view,
            prefill_backlog_tokens=max(view.prefill_backlog_tokens, backlog),
            decode_tokens=max(view.decode_tokens, decode_tokens),
            num_sequences=max(view.num_sequences, num_sequences),
        )
        if view.is_stale
        else view
        for view in views
    ]
