"""One route out of the two legs' rankings. What is chosen is what a list of all routes would give, least first by

    (prefill policy's score of the worker that computes the prompt, decode policy's score of the worker that generates)

but no such list is made: while the best prefill worker is joined with a decode worker, it is that one's partner, at no cost. Of a large
fleet the same is found by columns (column_chooser.py), where both policies can be asked so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pd_serve.ids import PeerId
from router.policy.base import Demand, LegPolicy, Route, RoutingSettings, Score, Scorer, WorkerView
from router.policy.candidates import Candidates, are_joined
from router.policy.column_chooser import ColumnChooser
from router.policy.columns import ColumnPolicy, WorkerTable
from router.policy.conditional import LocalOrRemote
from router.policy.prediction import remote_ttft_s


class RouteChooser:
    """Used by the dispatcher only. `conditional` None: only the rules of candidates.py say what is computed where it decodes."""

    def __init__(
        self, prefill_policy: LegPolicy, decode_policy: LegPolicy, settings: RoutingSettings, conditional: LocalOrRemote | None = None
    ) -> None:
        self.settings = settings
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._conditional = conditional
        self.reads_cached = (
            prefill_policy.reads_cached or decode_policy.reads_cached or conditional is not None or settings.local_prefill_max_tokens > 0
        )
        """What workers have cached matters here."""
        self.reads_lanes = prefill_policy.looks_at_pairs or decode_policy.looks_at_pairs or conditional is not None
        """So does how fast they can send KV to each other."""
        self._by_columns: ColumnChooser | None = None
        if isinstance(prefill_policy, ColumnPolicy) and isinstance(decode_policy, ColumnPolicy):
            can = prefill_policy.is_columnar and decode_policy.is_columnar and not decode_policy.looks_at_pairs
            self._by_columns = ColumnChooser(prefill_policy, decode_policy, settings, conditional) if can else None

    def num_to_compute(self, demand: Demand, route: Route) -> int:
        """Tokens of it that are new to the worker that computes them; all, where nothing depends on what is cached."""
        return demand.num_uncached(route.computing.peer) if self.reads_cached else demand.num_tokens

    def choose(self, demand: Demand, workers: Sequence[WorkerView]) -> Route | None:
        """Where it goes now; None: nowhere, it has to wait. With a worker to avoid only where there is nothing else."""
        if self._by_columns is not None and type(workers) is WorkerTable:
            route = self._by_columns.choose(demand, workers)
        else:
            route = self._choose_one_by_one(demand, workers)
        if route is not None and (demand.beside is None or route.decode.peer != demand.beside):
            self._prefill_policy.chosen(route.computing)
            self._decode_policy.chosen(route.decode)
        return route

    def _choose_one_by_one(self, demand: Demand, workers: Sequence[WorkerView]) -> Route | None:
        candidates = Candidates(demand, workers, self.settings)
        if candidates.beside is not None:
            return Route(None, candidates.beside, "cached")
        route = self._choose(demand, candidates, demand.avoid)
        if route is None and demand.avoid:
            route = self._choose(demand, candidates, ())
        return route

    def forget(self, peer: PeerId) -> None:
        """The worker is gone."""
        if self._conditional is not None:
            self._conditional.forget(peer)

    def _choose(self, demand: Demand, candidates: Candidates, avoid: Collection[PeerId]) -> Route | None:
        decodes = [worker for worker in candidates.decodes if worker.peer not in avoid] if avoid else candidates.decodes
        starting = [worker for worker in candidates.starting if worker.peer not in avoid] if avoid else candidates.starting
        remote: list[WorkerView] = []
        local: list[tuple[WorkerView, str]] = []
        for decode in decodes:
            reason = candidates.local_reason(decode)
            if not reason:
                remote.append(decode)
            elif candidates.can_start(decode):
                local.append((decode, reason))
        computing = [*starting, *(decode for decode, _ in local)]
        if computing and decodes:
            route = _Ranking(self._prefill_policy, self._decode_policy, demand, computing, decodes).best(starting, remote, local)
            if route is not None:
                return route if route.prefill is None else self._reconsidered(demand, candidates, route.prefill, route)
        return self._instead_of_waiting(demand, candidates, remote)

    def _reconsidered(self, demand: Demand, candidates: Candidates, prefill: WorkerView, route: Route) -> Route:
        if self._conditional is not None and candidates.can_start(route.decode):
            reason = self._conditional.reason(demand, prefill, route.decode)
            if reason:
                return Route(None, route.decode, reason)
        return route

    def _instead_of_waiting(self, demand: Demand, candidates: Candidates, remote: Sequence[WorkerView]) -> Route | None:
        """Every prefill worker is busy: it may be cheaper to compute the prompt where it decodes than to wait for one."""
        decodes = [decode for decode in remote if candidates.can_start(decode)] if self._conditional is not None else ()
        if self._conditional is None or not decodes:
            return None
        score = self._decode_policy.scorer(decodes, demand)
        decode = min(decodes, key=lambda worker: score(worker, None))
        partners = [prefill for prefill in candidates.prefills if are_joined(prefill, decode)]
        if not partners:
            return None
        prefill = min(partners, key=lambda worker: remote_ttft_s(worker, decode, demand))
        reason = self._conditional.reason(demand, prefill, decode)
        return Route(None, decode, reason) if reason else None


class _Ranking:
    """Both legs' scores for one decision."""

    def __init__(
        self,
        prefill_policy: LegPolicy,
        decode_policy: LegPolicy,
        demand: Demand,
        computing: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
    ) -> None:
        self._looks_at_pairs = prefill_policy.looks_at_pairs
        self._prefill_score: Scorer = prefill_policy.scorer(computing, demand)
        self._decode_score: Scorer = decode_policy.scorer(decodes, demand)
        self._reason = "session" if demand.session else "load"

    def best(self, starting: Sequence[WorkerView], remote: Sequence[WorkerView], local: Sequence[tuple[WorkerView, str]]) -> Route | None:
        """The first of those with the least score."""
        found: tuple[Score, Score] | None = None
        route: Route | None = None
        usual = self._least(starting, None)
        usual_score = () if usual is None else self._prefill_score(usual, None)
        for decode in remote:
            prefill, score = usual, usual_score
            if prefill is None:
                break
            if not are_joined(prefill, decode):
                prefill = self._least([worker for worker in starting if are_joined(worker, decode)], None)
                if prefill is None:
                    continue
                score = self._prefill_score(prefill, None)
            scores = score, self._decode_score(decode, prefill)
            if found is None or scores < found:
                found, route = scores, Route(prefill, decode, self._reason)
        for decode, reason in local:
            scores = self._prefill_score(decode, None), self._decode_score(decode, None)
            if found is None or scores < found:
                found, route = scores, Route(None, decode, reason)
        if route is not None and route.prefill is not None and self._looks_at_pairs:
            decode = route.decode
            prefill = self._least([worker for worker in starting if are_joined(worker, decode)], decode)
            return Route(prefill, decode, self._reason)
        return route

    def _least(self, workers: Sequence[WorkerView], partner: WorkerView | None) -> WorkerView | None:
        score = self._prefill_score
        return min(workers, key=lambda worker: score(worker, partner), default=None)
