"""chooser.py's choice, of columns: the same route for the same reason, in a number of array operations that does not depend on how many
workers there are. chooser.py is the specification; here stands only how it is found.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pd_serve.ids import PeerId
from router.policy.base import Demand, Route, RoutingSettings
from router.policy.columns import ColumnPolicy, Look, Mask, Rows, ScoreColumns, WorkerTable, first_least, rows_of
from router.policy.conditional import LocalOrRemote


class ColumnCandidates:
    """As Candidates, by row."""

    def __init__(self, look: Look, settings: RoutingSettings) -> None:
        table, demand = look.table, look.demand
        columns = table.columns
        self._look = look
        self._settings = settings
        fits = columns.max_model_len >= demand.num_tokens + demand.max_new_tokens
        has_room = (columns.num_free_tokens > demand.num_tokens) & (table.num_sequences < settings.max_sequences)
        self.decodes: Mask = table.can_decode & fits & has_room
        self.prefills: Mask = table.is_prefill & fits & (columns.num_pool_tokens > demand.num_tokens)
        self._usual = int(self.prefills.argmax()) if self.prefills.any() else None

    def can_start(self) -> Mask:
        settings, table, num_tokens = self._settings, self._look.table, self._look.demand.num_tokens
        can: Mask = table.backlog < settings.prefill_window_tokens
        if num_tokens <= settings.short_prompt_tokens:
            can |= table.columns.short_backlog <= settings.short_window_tokens - num_tokens
        return can

    def local(self) -> Mask:
        """Of the decodes, those with a rule by which they compute the prompt."""
        limit, demand, columns = self._settings.local_prefill_max_tokens, self._look.demand, self._look.table.columns
        if self._usual is None or demand.num_tokens <= limit:
            return self.decodes
        alone = self.decodes & ~self._partnered(self._usual)
        local = np.zeros_like(alone)
        if limit:
            local |= self.decodes & (self._look.num_uncached <= limit)
        if alone.any():
            local |= alone & columns.is_both
            if not (self.prefills & columns.is_joining).any():
                local |= alone & ~columns.is_joining
        return local

    def local_reason(self, decode: int) -> str:
        """Of one of local(), by the order of Candidates.local_reason."""
        limit, demand, columns = self._settings.local_prefill_max_tokens, self._look.demand, self._look.table.columns
        if columns.is_both[decode] and not (columns.pairs[decode] & self.prefills).any():
            return "colocated"
        if self._usual is None:
            return "no_prefill_worker"
        if demand.num_tokens <= limit:
            return "short_prompt"
        if limit and self._look.num_uncached[decode] <= limit:
            return "short_uncached"
        return "no_joined_pair"

    def has_route_when_idle(self) -> bool:
        if not self.decodes.any():
            return False
        return bool(self.local().any()) or (self._usual is not None and bool((self.decodes & self._partnered(self._usual)).any()))

    def _partnered(self, usual: int) -> Mask:
        """Those that have joined a prefill worker; right for decodes only."""
        pairs = self._look.table.columns.pairs
        found: Mask = pairs[usual]
        others = rows_of(self.decodes & ~found)
        if others.size:
            found = found.copy()
            found[others] = (pairs[others] & self.prefills).any(axis=1)
        return found


@dataclass(frozen=True, slots=True)
class ColumnChooser:
    """choose() as RouteChooser.choose, but for telling the policies."""

    prefill: ColumnPolicy
    decode: ColumnPolicy
    settings: RoutingSettings
    conditional: LocalOrRemote | None

    def choose(self, demand: Demand, table: WorkerTable) -> Route | None:
        look = Look(table, demand)
        candidates = ColumnCandidates(look, self.settings)
        beside = None if demand.beside is None else table.columns.rows.get(demand.beside)
        if beside is not None and candidates.decodes[beside]:
            return Route(None, table.view(beside), "cached")
        decision = _Decision(self, look, candidates)
        route = decision.choose(demand.avoid)
        return decision.choose(()) if route is None and demand.avoid else route


class _Decision:
    """One request's, with or without workers to avoid."""

    def __init__(self, chooser: ColumnChooser, look: Look, candidates: ColumnCandidates) -> None:
        self._chooser = chooser
        self._look = look
        self._columns = look.table.columns
        self._candidates = candidates
        self._is_local = candidates.local()
        self._can_start = candidates.can_start()

    def choose(self, avoid: Collection[PeerId]) -> Route | None:
        decodes, starting = self._candidates.decodes, self._candidates.prefills & self._can_start
        rows = [self._columns.rows[peer] for peer in avoid if peer in self._columns.rows]
        if rows:
            decodes, starting[rows] = decodes.copy(), False
            decodes[rows] = False
        remote = decodes & ~self._is_local
        route = self._best(decodes, starting, remote, decodes & self._is_local & self._can_start)
        return self._instead_of_waiting(remote) if route is None else route

    def _best(self, decodes: Mask, starting: Mask, remote: Mask, local: Mask) -> Route | None:
        decode_rows, starting_rows, local_rows = (rows_of(mask) for mask in (decodes, starting, local))
        if not decode_rows.size or not (starting_rows.size or local_rows.size):
            return None
        look, chooser = self._look, self._chooser
        computing = np.concatenate((starting_rows, local_rows)) if local_rows.size else starting_rows
        prefill_scores = chooser.prefill.score_columns(look, computing, None)
        decode_scores = chooser.decode.score_columns(look, decode_rows, None)
        num_starting = len(starting_rows)
        found = None
        if num_starting:
            of_starting = tuple([column[:num_starting] for column in prefill_scores])
            found = self._best_pair(of_starting, decode_scores, starting_rows, decode_rows, remote)
        if local_rows.size:
            scores = (
                *(column[num_starting:] for column in prefill_scores),
                *(column[np.searchsorted(decode_rows, local_rows)] for column in decode_scores),
            )
            place = first_least(scores)
            if found is None or _at(scores, place) < found[0]:
                decode = int(local_rows[place])
                return Route(None, look.table.view(decode), self._candidates.local_reason(decode))
        if found is None:
            return None
        _, prefill, decode = found
        if chooser.prefill.looks_at_pairs:
            partners = starting_rows[self._columns.pairs[decode][starting_rows]]
            prefill = int(partners[first_least(chooser.prefill.score_columns(look, partners, decode))])
        return self._reconsidered(prefill, decode)

    def _best_pair(
        self, scores: ScoreColumns, decode_scores: ScoreColumns, starting: Rows, decodes: Rows, remote: Mask
    ) -> tuple[tuple[object, ...], int, int] | None:
        """(score, prefill, decode): the best prefill worker that has a partner, and the best of the decode workers that have it, or one
        that is as good, for a partner.
        """
        pairs = self._columns.pairs
        best = first_least(scores)
        joined: Mask = remote & pairs[starting[best]]
        if not joined.any():
            has_partner: Mask = np.logical_or.reduce(pairs[rows_of(remote)])
            with_partner = rows_of(has_partner[starting])
            if not with_partner.size:
                return None
            best = int(with_partner[first_least(tuple([column[with_partner] for column in scores]))])
            joined = remote & pairs[starting[best]]
        equals: Mask | None = None
        others = rows_of(remote & ~joined)
        if others.size:
            is_equal = np.ones(len(starting), np.bool_)
            for column in scores:
                is_equal &= column == column[best]
            equals = np.zeros_like(remote)
            equals[starting[is_equal]] = True
            joined = joined.copy()
            joined[others] = (pairs[others] & equals).any(axis=1)
        places = rows_of(joined[decodes])
        place = int(places[first_least(tuple([column[places] for column in decode_scores]))])
        decode, prefill = int(decodes[place]), int(starting[best])
        if equals is not None and not pairs[prefill, decode]:
            prefill = int((pairs[decode] & equals).argmax())
        return (*_at(scores, best), *_at(decode_scores, place)), prefill, decode

    def _reconsidered(self, prefill: int, decode: int) -> Route:
        look, conditional = self._look, self._chooser.conditional
        first, second = look.table.view(prefill), look.table.view(decode)
        if conditional is not None and self._can_start[decode] and (reason := conditional.reason(look.demand, first, second)):
            return Route(None, second, reason)
        return Route(first, second, "session" if look.demand.session else "load")

    def _instead_of_waiting(self, remote: Mask) -> Route | None:
        look, conditional = self._look, self._chooser.conditional
        decodes = rows_of(remote & self._can_start) if conditional is not None else np.zeros(0, np.intp)
        if conditional is None or not decodes.size:
            return None
        decode = int(decodes[first_least(self._chooser.decode.score_columns(look, decodes, None))])
        partners = rows_of(self._candidates.prefills & self._columns.pairs[decode])
        if not partners.size:
            return None
        prefill = int(partners[look.remote_ttft_s(partners, decode).argmin()])
        second = look.table.view(decode)
        reason = conditional.reason(look.demand, look.table.view(prefill), second)
        return Route(None, second, reason) if reason else None


def _at(scores: ScoreColumns, place: int) -> tuple[object, ...]:
    return tuple([column[place].item() for column in scores])
