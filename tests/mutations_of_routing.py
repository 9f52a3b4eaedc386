"""Mistakes in where requests go, and when they move."""

from __future__ import annotations

from tests.mutation import Mutation

_ROUTER = "tests/unit/router/"

ROUTING: dict[str, Mutation] = {
    "hot-worker-ends-affinity": Mutation(
        "router/policy/candidates.py",
        "next((worker for worker in self.decodes if worker.peer == demand.beside), None)",
        "next((d for d in self.decodes if d.peer == demand.beside and len(self.decodes) == len(workers)), None)",
        _ROUTER + "test_routing.py::test_one_hot_worker_does_not_end_affinity",
    ),
    "hot-worker-is-stuck-to": Mutation(
        "router/policy/candidates.py",
        "next((worker for worker in self.decodes if worker.peer == demand.beside), None)",
        "next((worker for worker in workers if worker.peer == demand.beside), None)",
        _ROUTER + "test_routing.py::test_one_hot_worker_does_not_end_affinity",
    ),
    "handover-waited-for": Mutation(
        "router/dispatcher.py",
        "self._loop.call_later(timeout_s, self._handover_timed_out, attempt_id)",
        "pass",
        _ROUTER + "test_failures.py::test_a_lost_record_costs_the_handover_timeout_and_not_the_transfers",
    ),
    "handover-of-those-who-spoke": Mutation(
        "router/lifecycle.py",
        "if attempt is None or attempt.attempt_id != attempt_id or attempt.has_spoken:",
        "if attempt is None or attempt.attempt_id != attempt_id:",
        _ROUTER + "test_lifecycle.py::test_a_request_whose_record_was_lost_moves_and_only_decode_is_cancelled",
    ),
}
