"""What policies see of a large fleet: the same WorkerViews, as columns of numbers, so that a look at all of them is a few operations on
arrays. Kept by router/roster.py, which changes a row when something changes for its worker; read within one decision only.

A row is a worker's place among all that are linked; those that take no requests now keep theirs. What candidates.py, chooser.py and the
policies' scorers say of single views is said of columns here and in column_chooser.py: a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from pd_serve.ids import PeerId
from pd_serve.protocol.link import Role
from router.policy.base import NO_BANDWIDTH, SEQUENCE_TOKENS, Demand, Leg, LegPolicy, WorkerView
from router.policy.prediction import PRIOR_BANDWIDTH
from router.prefixes import CachedTokens

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
"""By row."""
Rows = npt.NDArray[np.intp]
"""Ascending."""
ScoreColumns = tuple[npt.NDArray[Any], ...]
"""Scores (policy/base.py) of several rows, place by place."""

_NUM_INTS, _NUM_FLAGS = 9, 6


class Columns:
    """arrange() when workers come and go, put() when one looks otherwise. Owned by the roster."""

    def __init__(self, keeps_lanes: bool = True) -> None:
        """`keeps_lanes`: lanes_to() is going to be asked for; False: it is slow."""
        self.peers: tuple[PeerId, ...] = ()
        """By row; another tuple whenever rows have moved: what is made of it may be kept by its identity."""
        self.rows: dict[PeerId, int] = {}
        self.views: list[WorkerView | None] = []
        """None: it takes no requests."""
        self._joined: list[frozenset[PeerId]] = []
        self._bandwidths: list[Mapping[PeerId, float]] = []
        self._lanes: Floats | None = np.zeros((0, 0), np.float64) if keeps_lanes else None
        """[row, other row]: bytes per second from the other."""
        self._knows: Mask = np.zeros((0, 0), np.bool_)
        """[row, other row]: the one has joined the other."""
        self.pairs: Mask = np.zeros((0, 0), np.bool_)
        """Both have."""
        self._bind(np.zeros((_NUM_INTS, 0), np.int64), np.zeros((_NUM_FLAGS, 0), np.bool_), np.zeros(0, np.float64))

    def arrange(self, peers: tuple[PeerId, ...], before: Sequence[int]) -> None:
        """The workers are these; `before`: the row that each had, -1 for one that is new and that put() has yet to tell of."""
        source = np.array(before, np.intp)
        self._bind(_taken(self._ints, source), _taken(self._flags, source), _taken(self.speed, source))
        self.views = [None if row < 0 else self.views[row] for row in before]
        self._joined = [frozenset() if row < 0 else self._joined[row] for row in before]
        self._bandwidths = [NO_BANDWIDTH if row < 0 else self._bandwidths[row] for row in before]
        self.peers = peers
        self.rows = {peer: row for row, peer in enumerate(peers)}
        self._knows = _taken_twice(self._knows, source)
        if self._lanes is not None:
            self._lanes = _taken_twice(self._lanes, source)
        for row in rows_of(source < 0):
            peer = peers[row]
            self._knows[:, row] = [peer in joined for joined in self._joined]
            if self._lanes is not None:
                self._lanes[:, row] = PRIOR_BANDWIDTH
                self._lanes[row] = self._lanes_by_name(peer)
        self.pairs = self._knows & self._knows.T

    def assume_speed(self, tokens_per_s: float) -> None:
        """Of workers whose speed was not measured. Their views keep the one they were made with; WorkerTable tells this one."""
        self.speed[~self._is_measured] = tokens_per_s

    def put(self, row: int, view: WorkerView | None, is_measured: bool = True) -> None:
        """It looks like this; None: it takes no requests. `is_measured`: its speed is."""
        self.views[row] = view
        if view is None:
            self._flags[:, row] = False
            return
        self._ints[:, row] = (
            view.max_model_len,
            view.num_pool_tokens,
            view.num_free_tokens,
            view.prefill_backlog_tokens,
            view.decode_tokens,
            view.num_sequences,
            view.short_backlog_tokens,
            view.kv_bytes_per_token,
            view.num_layers,
        )
        role = view.role
        is_prefill = role is Role.PREFILL
        self._flags[:, row] = (is_prefill, not is_prefill, role is Role.BOTH, view.is_joining, view.is_stale, is_measured)
        self.speed[row] = view.prefill_tokens_per_s
        if view.joined is not self._joined[row]:
            self._joined[row] = view.joined
            knows = self._knows[row]
            knows[:] = False
            knows[[self.rows[peer] for peer in view.joined if peer in self.rows]] = True
            self.pairs[row] = self.pairs[:, row] = knows & self._knows[:, row]
        if view.bandwidths is not self._bandwidths[row]:
            self._bandwidths[row] = view.bandwidths
            if self._lanes is not None:
                known = [(self.rows[peer], bandwidth) for peer, bandwidth in view.bandwidths.items() if bandwidth and peer in self.rows]
                self._lanes[:, row] = PRIOR_BANDWIDTH
                self._lanes[[other for other, _ in known], row] = [bandwidth for _, bandwidth in known]

    def lanes_to(self, decode: int) -> Floats:
        """Bytes per second from each row to that one, the usual where they were not measured."""
        return self._lanes_by_name(self.peers[decode]) if self._lanes is None else self._lanes[decode]

    def _lanes_by_name(self, peer: PeerId) -> Floats:
        return np.array([known.get(peer, 0.0) or PRIOR_BANDWIDTH for known in self._bandwidths], np.float64)

    def _bind(self, ints: Ints, flags: Mask, speed: Floats) -> None:
        self._ints, self._flags, self.speed = ints, flags, speed
        (
            self.max_model_len,
            self.num_pool_tokens,
            self.num_free_tokens,
            self.backlog,
            self.decode_tokens,
            self.num_sequences,
            self.short_backlog,
            self.kv_bytes_per_token,
            self.num_layers,
        ) = ints
        self.is_prefill, self.can_decode, self.is_both, self.is_joining, self.is_stale, self._is_measured = flags


class WorkerTable(Sequence[WorkerView]):
    """The workers of Columns that take requests, as they are at one moment: it means nothing any more once the columns have changed.

    Those that are stale count as loaded as the most loaded of the others (assignment.as_worst_known).
    """

    def __init__(self, columns: Columns, without: Iterable[PeerId] = ()) -> None:
        self.columns = columns
        self.is_prefill, self.can_decode = columns.is_prefill, columns.can_decode
        hidden = [columns.rows[peer] for peer in without if peer in columns.rows]
        if hidden:
            shown = np.ones(len(columns.peers), np.bool_)
            shown[hidden] = False
            self.is_prefill, self.can_decode = self.is_prefill & shown, self.can_decode & shown
        self.backlog, self.decode_tokens, self.num_sequences = columns.backlog, columns.decode_tokens, columns.num_sequences
        self._decode_load: Ints | None = None
        self._stale = columns.is_stale
        if self._stale.any():
            self.backlog, self.decode_tokens, self.num_sequences = (
                self._as_worst(own) for own in (self.backlog, self.decode_tokens, self.num_sequences)
            )

    def without(self, peers: Iterable[PeerId]) -> WorkerTable:
        return WorkerTable(self.columns, peers)

    @property
    def decode_load(self) -> Ints:
        if self._decode_load is None:
            self._decode_load = self.decode_tokens + SEQUENCE_TOKENS * self.num_sequences
        return self._decode_load

    def load(self, leg: Leg) -> Ints:
        return self.backlog if leg is Leg.PREFILL else self.decode_load

    def find(self, peer: PeerId) -> WorkerView | None:
        """As the columns have it; None: it takes no requests."""
        row = self.columns.rows.get(peer)
        return None if row is None else self.columns.views[row]

    def view(self, row: int) -> WorkerView:
        """Precondition: it takes requests."""
        view = self.columns.views[row]
        assert view is not None
        speed = self.columns.speed[row]
        if not view.is_stale and view.prefill_tokens_per_s == speed:
            return view
        return msgspec.structs.replace(
            view,
            prefill_tokens_per_s=float(speed),
            prefill_backlog_tokens=int(self.backlog[row]),
            decode_tokens=int(self.decode_tokens[row]),
            num_sequences=int(self.num_sequences[row]),
        )

    @property
    def _rows(self) -> list[int]:
        rows: list[int] = rows_of(self.is_prefill | self.can_decode).tolist()
        return rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[WorkerView]:
        return map(self.view, self._rows)

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[WorkerView, ...]: ...
    def __getitem__(self, index: int | slice) -> WorkerView | tuple[WorkerView, ...]:
        return self.view(self._rows[index]) if isinstance(index, int) else tuple(map(self.view, self._rows[index]))

    def _as_worst(self, own: Ints) -> Ints:
        columns = self.columns
        fresh = own[(columns.is_prefill | columns.can_decode) & ~self._stale]
        worst = fresh.max() if fresh.size else 0
        return np.where(self._stale, np.maximum(own, worst), own)


class Look:
    """One decision's: what is asked of columns for one request is made once."""

    def __init__(self, table: WorkerTable, demand: Demand) -> None:
        self.table = table
        self.demand = demand
        self._cached: Ints | None = None
        self._num_uncached: Ints | None = None

    @property
    def cached(self) -> Ints:
        """Tokens that each row has in its prefix cache."""
        if self._cached is None:
            self._cached = self._new_cached()
        return self._cached

    @property
    def num_uncached(self) -> Ints:
        """As Demand.num_uncached."""
        if self._num_uncached is None:
            self._num_uncached = np.maximum(1, self.demand.num_tokens - self.cached)
        return self._num_uncached

    def _new_cached(self) -> Ints:
        cached, columns = self.demand.cached, self.table.columns
        if isinstance(cached, CachedTokens):
            return cached.column(columns.peers)
        tokens = np.zeros(len(columns.peers), np.int64)
        for peer, num_tokens in cached.items():
            if peer in columns.rows:
                tokens[columns.rows[peer]] = num_tokens
        return tokens

    def local_ttft_s(self, rows: Rows) -> Floats:
        """As prediction.local_ttft_s."""
        speed = self.table.columns.speed[rows]
        seconds: Floats = self.table.backlog[rows] / speed + self.num_uncached[rows] / speed
        return seconds

    def remote_ttft_s(self, prefills: Rows, decode: int) -> Floats:
        """As prediction.remote_ttft_s."""
        columns = self.table.columns
        speed = columns.speed[prefills]
        compute = self.num_uncached[prefills] / speed
        nbytes = int(self.num_uncached[decode]) * int(columns.kv_bytes_per_token[decode])
        transfer = nbytes / columns.lanes_to(decode)[prefills]
        shorter = np.minimum(compute, transfer) / columns.num_layers[prefills]
        seconds: Floats = self.table.backlog[prefills] / speed + np.maximum(compute, transfer) + shorter
        return seconds


@runtime_checkable
class ColumnPolicy(LegPolicy, Protocol):
    """One that can score columns too. One that cannot is asked for each worker, however many there are."""

    @property
    def is_columnar(self) -> bool:
        """It can, as it is set up."""
        ...

    def score_columns(self, look: Look, rows: Rows, partner: int | None) -> ScoreColumns:
        """What scorer(workers of `rows`, demand) says of each of them, with this partner (its row). Draws what that draws."""
        ...


def rows_of(mask: Mask) -> Rows:
    return mask.nonzero()[0]


def first_least(scores: ScoreColumns) -> int:
    """The place of the first of those with the least score. Precondition: there are any."""
    first = scores[0]
    if len(scores) == 1:
        return int(first.argmin())
    places = rows_of(first == first.min())
    for column in scores[1:]:
        if len(places) == 1:
            break
        values = column[places]
        places = places[values == values.min()]
    return int(places[0])


class ByPeers:
    """A column made of the workers' names or of what is remembered of them, kept until rows move."""

    def __init__(self, make: Callable[[tuple[PeerId, ...]], npt.NDArray[Any]]) -> None:
        self._make = make
        self._peers: tuple[PeerId, ...] | None = None
        self._rows: dict[PeerId, int] = {}
        self._column: npt.NDArray[Any] = np.zeros(0)

    def of(self, peers: tuple[PeerId, ...]) -> npt.NDArray[Any]:
        if peers is not self._peers:
            self._peers, self._column = peers, self._make(peers)
            self._rows = {peer: row for row, peer in enumerate(peers)}
        return self._column

    def change(self, peer: PeerId, value: int) -> None:
        """Of one worker, if it has a row."""
        row = self._rows.get(peer)
        if row is not None:
            self._column[row] = value


def _taken(array: npt.NDArray[Any], source: Rows) -> npt.NDArray[Any]:
    """Its last axis in another order; -1 stands for zeros."""
    end = np.zeros((*array.shape[:-1], 1), array.dtype)
    return np.ascontiguousarray(np.concatenate((array, end), axis=-1)[..., source])


def _taken_twice(matrix: npt.NDArray[Any], source: Rows) -> npt.NDArray[Any]:
    """Both axes, at once: of a thousand workers these are megabytes."""
    new = np.zeros((len(source), len(source)), matrix.dtype)
    kept = rows_of(source >= 0)
    new[np.ix_(kept, kept)] = matrix[np.ix_(source[kept], source[kept])]
    return new
