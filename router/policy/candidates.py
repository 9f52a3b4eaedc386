"""Which workers can take a request now. A pair can when its prefill has joined its decode, neither is draining, the request fits, and the
worker that computes the prompt could start it within about a step: the queue lives in the router, so that no reserved block waits one out.
A short prompt is started in the next step however long the others are (pd_serve.engine.scheduler_prompts): only those as short count.

No list of pairs is made: where all workers are joined, a look at all of them takes time in their number, not in that of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.protocol.link import Role
from router.policy.base import Demand, RoutingSettings, WorkerView
from router.policy.column_chooser import ColumnCandidates
from router.policy.columns import Look, WorkerTable


class Candidates:
    """Of one request, as of now."""

    __slots__ = ("_demand", "_is_idle", "_settings", "_usual_partner", "beside", "decodes", "prefills", "starting")

    def __init__(self, demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings, is_idle: bool = False) -> None:
        """`is_idle`: as if no prompt were being computed anywhere."""
        self._demand = demand
        self._settings = settings
        self._is_idle = is_idle
        prefill, num_tokens, most_sequences = Role.PREFILL, demand.num_tokens, settings.max_sequences
        num_all = num_tokens + demand.max_new_tokens
        self.decodes = [
            worker
            for worker in workers
            if worker.role is not prefill
            and num_all <= worker.max_model_len
            and num_tokens < worker.num_free_tokens
            and worker.num_sequences < most_sequences
        ]
        self.beside: WorkerView | None = None
        """Has the prompt, and room."""
        if demand.beside is not None:
            self.beside = next((worker for worker in self.decodes if worker.peer == demand.beside), None)
        self.prefills = [worker for worker in workers if worker.role is prefill and _can_compute(demand, worker)]
        self.starting = [worker for worker in self.prefills if self.can_start(worker)]
        self._usual_partner: WorkerView | None = self.prefills[0] if self.prefills else None

    def can_start(self, worker: WorkerView) -> bool:
        settings = self._settings
        if self._is_idle or worker.prefill_backlog_tokens < settings.prefill_window_tokens:
            return True
        num_tokens = self._demand.num_tokens
        return num_tokens <= settings.short_prompt_tokens and worker.short_backlog_tokens + num_tokens <= settings.short_window_tokens

    def local_reason(self, decode: WorkerView) -> str:
        """The rule by which the prompt is computed where it decodes; empty: there is none."""
        limit, demand = self._settings.local_prefill_max_tokens, self._demand
        if decode.role is Role.BOTH and not self._has_partner(decode):
            return "colocated"
        if not self.prefills:
            return "no_prefill_worker"
        if demand.num_tokens <= limit:
            return "short_prompt"
        if limit and demand.num_uncached(decode.peer) <= limit:
            return "short_uncached"
        if not decode.is_joining and not self._has_partner(decode) and not any(prefill.is_joining for prefill in self.prefills):
            return "no_joined_pair"
        return ""

    def _has_partner(self, decode: WorkerView) -> bool:
        """Most have the same."""
        usual = self._usual_partner
        if usual is not None and are_joined(usual, decode):
            return True
        self._usual_partner = next((prefill for prefill in self.prefills if are_joined(prefill, decode)), usual)
        return self._usual_partner is not None and are_joined(self._usual_partner, decode)


def waits_for_compute_only(demand: Demand, workers: Sequence[WorkerView], settings: RoutingSettings) -> bool:
    """Whether there were a route if no prompt was being computed anywhere: nothing that others take meanwhile is missing."""
    if type(workers) is WorkerTable:
        return ColumnCandidates(Look(workers, demand), settings).has_route_when_idle()
    idle = Candidates(demand, workers, settings, is_idle=True)
    return any(idle.local_reason(decode) or any(are_joined(prefill, decode) for prefill in idle.prefills) for decode in idle.decodes)


def are_joined(prefill: WorkerView, decode: WorkerView) -> bool:
    return decode.peer in prefill.joined and prefill.peer in decode.joined


def could_hold(demand: Demand, worker: WorkerView) -> bool:
    """It could be generated there, were the worker idle."""
    return worker.can_decode and _can_compute(demand, worker)


def could_any_hold(demand: Demand, workers: Sequence[WorkerView]) -> bool:
    if type(workers) is not WorkerTable:
        return any(could_hold(demand, worker) for worker in workers)
    columns = workers.columns
    fits = columns.max_model_len >= demand.num_tokens + demand.max_new_tokens
    return bool((workers.can_decode & fits & (columns.num_pool_tokens > demand.num_tokens)).any())


def longest_model_len(workers: Sequence[WorkerView]) -> int:
    """Of those that decode; 0: there are none."""
    if type(workers) is not WorkerTable:
        return max((worker.max_model_len for worker in workers if worker.can_decode), default=0)
    lengths = workers.columns.max_model_len[workers.can_decode]
    return int(lengths.max()) if lengths.size else 0


def shortest_model_len(workers: Sequence[WorkerView], above: int) -> int:
    """Of all that take more than `above`; 0: there are none."""
    if type(workers) is not WorkerTable:
        return min((worker.max_model_len for worker in workers if worker.max_model_len > above), default=0)
    lengths = workers.columns.max_model_len[workers.is_prefill | workers.can_decode]
    lengths = lengths[lengths > above]
    return int(lengths.min()) if lengths.size else 0


def _can_compute(demand: Demand, worker: WorkerView) -> bool:
    """Were the worker idle. A prefill worker refuses what it could not finish by itself."""
    return demand.num_tokens + demand.max_new_tokens <= worker.max_model_len and demand.num_tokens < worker.num_pool_tokens
