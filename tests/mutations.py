"""One-line mistakes, each of which a named test must find. `python -m tests.mutations [NAME ...]` replays them in a copy of the tree.

docs/failures.md names them; tests/test_failures_table.py checks that each still fits the line it changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutation import Mutation
from tests.mutations_of_bounds import BOUNDS
from tests.mutations_of_routing import ROUTING

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("pd_serve", "router", "workers", "tests", "docs", "configs", "docker")
_FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")


_ROUTER = "tests/unit/router/"
_WORKERS = "tests/unit/workers/"
_CLASSES = _ROUTER + "test_failure_classes.py::"
_APART = _WORKERS + "test_answers_stay_apart.py::"
_LOOP = _WORKERS + "test_control_loop.py::"
_UCX = "tests/contract/ucx/"

MUTATIONS: dict[str, Mutation] = {
    "messages-over-shared-memory": Mutation(
        "pd_serve/transport/ucx/ports.py",
        'self._voice_of_shm = self._ports.get(Lane.TCP) or Port(binding, Lane.TCP, LOOPBACK, "cpu")',
        "self._voice_of_shm = self._ports[Lane.SHM]",
        _UCX + "test_death.py::test_nothing_depends_on_the_queue_that_all_senders_over_shared_memory_share",
    ),
    "one-token-too-many": Mutation(
        "workers/prefill/machine.py",
        "start = max(start, job.target.num_cached_tokens)",
        "start = max(start, job.target.num_cached_tokens - 1)",
        _LOOP + "test_only_the_suffix_that_decode_lacks_is_moved",
    ),
    "stale-record-slot": Mutation(
        "workers/prefill/completions.py",
        "token = sampled[command.notice.attempt_id]",
        'token = vars(self).setdefault("_slot", sampled[command.notice.attempt_id])',
        _APART + "test_the_record_beside_the_kv_is_the_attempts_own",
    ),
    "no-deadline": Mutation(
        "pd_serve/kv/lease.py",
        "if lease.state is LeaseState.GRANTED and lease.deadline <= now)",
        "if lease.state is LeaseState.GRANTED and lease.deadline + 3600 <= now)",
        _APART + "test_a_lost_record_costs_its_own_attempt_only",
    ),
    "deadline-of-the-oldest-only": Mutation(
        "pd_serve/kv/lease.py",
        "return tuple(lease for lease in self._leases.values() if lease.state is LeaseState.GRANTED and lease.deadline <= now)",
        "return tuple(lease for lease in list(self)[:1] if lease.state is LeaseState.GRANTED and lease.deadline <= now)",
        "tests/unit/kv/test_lease.py::test_a_live_old_lease_does_not_hold_up_an_expired_younger_one",
    ),
    "failed-layer-forgotten": Mutation(
        "workers/prefill/pusher.py",
        'piece.transfer.problem = piece.transfer.problem or detail or "flush failed"',
        "pass",
        _WORKERS + "test_pusher.py::test_a_failed_layer_flush_spoils_the_attempt",
    ),
    "any-byte-count": Mutation(
        "workers/decode/machine.py",
        "if notice.nbytes != owed:",
        "if False:",
        _WORKERS + "test_decode_machine.py::test_a_damaged_completion_fails_the_attempt_and_frees_nothing",
    ),
    "first-token-never-ends": Mutation(
        "workers/decode/machine.py",
        "finish = sequence.append(notice.first_token, self._scheduler.rules)",
        "finish = sequence.append(notice.first_token, self._scheduler.rules) and None",
        _APART + "test_first_tokens_end_as_they_do_where_they_are_computed",
    ),
    "longest-worker-counts": Mutation(
        "router/admission.py",
        "context = min(contexts, default=0)",
        "context = max(contexts, default=0)",
        _CLASSES + "test_no_worker_hears_of_a_prompt_too_long_for_any_of_them",
    ),
    "prompt-alone-must-fit": Mutation(
        "router/policy/candidates.py",
        "return demand.num_tokens + demand.max_new_tokens <= worker.max_model_len and",
        "return demand.num_tokens < worker.max_model_len and",
        _ROUTER + "test_routing.py::test_prefill_worker_that_came_later_and_takes_less_is_no_candidate",
    ),
    "too-long-for-ever-first": Mutation(
        "router/assignment.py",
        "if settle(generation, views):",
        "if False:",
        _ROUTER + "test_failures.py::test_request_without_a_budget_that_came_before_any_worker_is_served_and_holds_up_nobody",
    ),
    "every-choice-prefills": Mutation(
        "router/dispatcher.py",
        "if rest and self._settings.share_prefix:",
        "if False:",
        _ROUTER + "test_serving.py::test_n_choices_send_the_prompt_once",
    ),
    "more-cached-than-prompt": Mutation(
        "router/exchange.py",
        "num_cached += min(self._choices[first].text.num_cached_tokens, len(prompt.token_ids))",
        "num_cached += self._choices[first].text.num_cached_tokens",
        _ROUTER + "test_serving.py::test_usage_shows_cached_tokens_within_the_prompt",
    ),
    "wrong-kv-digest-taken": Mutation(
        "workers/decode/arrivals.py",
        "if lease.claimed % 2**64 != _as_int(digest_of_pool(",
        "if 0 == _as_int(digest_of_pool(",
        _WORKERS + "test_arrivals.py::test_a_changed_byte_is_damage",
    ),
    "attempt-ids-used-again": Mutation(
        "router/dispatcher.py",
        "return AttemptId(next(self._attempt_ids))",
        "return AttemptId(next(self._attempt_ids) % 64)",
        _CLASSES + "test_every_answer_repeats_its_own_secret_word",
    ),
    "two-incarnations-at-once": Mutation(
        "workers/peers.py",
        "return any(known.worker_id == peer.worker_id for known in self._entries)",
        "return False",
        _WORKERS + "test_machine.py::test_a_new_incarnation_has_the_old_one_fenced_if_it_holds_a_lease",
    ),
    "one-death-is-every-death": Mutation(
        "router/pool.py",
        "self.on_lost(worker.peer)",
        "list(map(self.on_lost, (worker.peer, *self._workers)))",
        _CLASSES + "test_death_of_one_decode_worker_touches_only_what_it_had",
    ),
    "prefill-needed-to-the-end": Mutation(
        "router/lifecycle.py",
        "elif peer == attempt.prefill and attempt.prefill_leg is not _Leg.ENDED:",
        "elif peer == attempt.prefill:",
        _CLASSES + "test_running_decodes_outlive_every_prefill_worker",
    ),
    "no-prefill-no-service": Mutation(
        "router/policy/candidates.py",
        'return "no_prefill_worker"',
        'return ""',
        _CLASSES + "test_running_decodes_outlive_every_prefill_worker",
    ),
    "drain-waits-for-nobody": Mutation(
        "workers/machine.py",
        "self._drain_at = now + deadline_s",
        "self._drain_at = now",
        _LOOP + "test_drain_refuses_new_work_finishes_the_old_and_reports_idle_at_once",
    ),
    "refused-once-refused-for-ever": Mutation(
        "router/load.py", "worker.has_refused = False", "pass", _ROUTER + "test_failures.py::test_capacity_refusals_wait_for_room"
    ),
    "links-are-made-once": Mutation(
        "router/pool.py",
        "await asyncio.sleep(MAX_BACKOFF_S if address.refusal else backoff_s)",
        "return",
        _CLASSES + "test_first_request_after_a_link_died_in_silence",
    ),
    "pings-unanswered": Mutation(
        "pd_serve/protocol/client.py",
        "pending = self._websocket.data_to_send()",
        "pending: list[bytes] = []",
        _CLASSES + "test_links_and_pooled_connections_live_through_a_long_idle_time",
    ),
    "ended-is-delivered": Mutation(
        "pd_serve/transport/ucx/sessions.py",
        "Flushed(completion.token, completion.ok, completion.detail)",
        "Flushed(completion.token, True, completion.detail)",
        _UCX + "test_idle.py::test_the_first_transfer_to_a_target_that_died_while_idle_fails_at_once",
    ),
    "links-are-tried-once": Mutation(
        "router/pool.py",
        "await asyncio.sleep(MAX_BACKOFF_S if address.refusal else backoff_s)",
        "return",
        _CLASSES + "test_every_start_order_converges",
    ),
    "watch-kept-after-departure": Mutation(
        "pd_serve/transport/ucx/fences.py",
        "            self._watch.discard(pidfd)",
        "            pass",
        _UCX + "test_pool.py::test_fifty_joins_and_departures_leave_descriptors_and_memory_flat",
    ),
    "keys-kept-after-departure": Mutation(
        "pd_serve/transport/ucx/one_sided.py",
        "self._pool.key.close()",
        "pass",
        _UCX + "test_pool.py::test_fifty_joins_and_departures_leave_descriptors_and_memory_flat",
    ),
    "keys-of-the-dead-kept": Mutation(
        "pd_serve/transport/ucx/one_sided.py",
        "self._pool.key.close()",
        "pass",
        _UCX + "test_identity.py::test_a_peer_restarted_on_the_same_host_is_joined_anew",
    ),
    "first-failure-frees": Mutation(
        "pd_serve/kv/lease.py",
        "lease.writing.discard(contributor)",
        "lease.writing.clear()",
        "tests/unit/kv/test_lease_contributors.py::test_any_order_of_endings_returns_every_block_once_and_with_the_last_holder",
    ),
    "one-rank-speaks-for-all": Mutation(
        "workers/decode/quarantine.py",
        "        if not lease.writing:\n            self._release(lease.lease_id)\n        return True",
        "        self._release(lease.lease_id)\n        return True",
        _WORKERS + "test_decode_contributors.py::test_after_a_cancel_each_rank_is_waited_for",
    ),
    "first-part-is-enough": Mutation(
        "pd_serve/kv/lease.py",
        "return not lease.missing",
        "return True",
        _WORKERS + "test_decode_contributors.py::test_decode_starts_with_the_last_part_whichever_that_is",
    ),
    "any-bandwidth": Mutation(
        "pd_serve/transport/ucx/joining.py",
        "if peer.bandwidth < node.settings.min_bandwidth:",
        "if False:",
        _UCX + "test_paths.py::test_a_lane_slower_than_the_floor_is_refused_and_the_other_side_told",
    ),
    "joins-wait-for-ever": Mutation(
        "pd_serve/transport/ucx/joining.py",
        "if now >= peer.deadline:",
        "if False:",
        _UCX + "test_identity.py::test_an_address_where_nobody_answers_is_refused_in_time_and_named",
    ),
    "deaf-to-the-client": Mutation(
        "router/exchange.py",
        "self._line.watch(self._client_gone, self._woken)",
        "self._line.watch(lambda: None, self._woken)",
        _ROUTER + "test_failures.py::test_client_that_goes_away_leaves_nothing",
    ),
    "old-attempts-heard": Mutation(
        "router/lifecycle.py",
        "if attempt is None or frame.attempt_id != attempt.attempt_id or peer not in self.peers:",
        "if attempt is None or peer not in self.peers:",
        _ROUTER + "test_lifecycle.py::test_frames_and_tokens_of_an_attempt_that_was_left_are_ignored",
    ),
    "growth-in-flight-forgotten": Mutation(
        "workers/decode/machine.py",
        "+ self._num_promised_blocks(headroom) > self._pool.num_allocatable",
        "> self._pool.num_allocatable",
        _WORKERS + "test_decode_machine.py::test_admission_counts_headroom_of_sequences_whose_kv_is_in_flight",
    ),
    "abandoned-requests-go-on": Mutation(
        "router/exchange.py",
        "self._line.watch(self._client_gone, self._woken)",
        "self._line.watch(lambda: None, self._woken)",
        _CLASSES + "test_overload_by_impatient_clients_leaves_an_idle_system",
    ),
    "silence-is-health": Mutation(
        "workers/front_view.py",
        "if silence_s > MISSED_REPORTS * self._report_interval_s:",
        "if False:",
        _WORKERS + "test_front_view.py::test_missed_reports_are_a_frozen_engine_and_one_more_mends_it",
    ),
    "waiting-counts-as-transfer": Mutation(
        "workers/prefill/pusher.py",
        "service_s = now - max(flight.started_at, self._last_end.get(flight.peer, flight.started_at))",
        "service_s = now - flight.started_at",
        _WORKERS + "test_transport_thread_on_bad_links.py::test_the_gauge_of_a_throttled_link_reads_its_bandwidth",
    ),
    "load-as-last-reported": Mutation(
        "router/load.py",
        "return max(reported, min(charges.num_tokens, reported + charges.num_uncovered_tokens))",
        "return reported",
        _ROUTER + "test_routing.py::test_burst_spreads_by_tokens_before_any_report",
    ),
    "new-worker-looks-empty": Mutation(
        "router/load.py",
        "self._changed(decode).decode.add(key, num_tokens)",
        "pass",
        _ROUTER + "test_routing.py::test_new_empty_worker_is_not_flooded",
    ),
    "busy-is-busy": Mutation(
        "router/policy/least_tokens.py",
        "return (worker.load(self._leg),)",
        "return (int(worker.load(self._leg) > 0),)",
        _ROUTER + "test_routing.py::test_burst_spreads_by_tokens_before_any_report",
    ),
    "load-of-prompts-unseen": Mutation(
        "router/load.py",
        "return max(reported, min(charges.num_tokens, reported + charges.num_uncovered_tokens))",
        "return reported",
        _CLASSES + "test_burst_of_mixed_lengths_is_shared_by_tokens",
    ),
    "any-key-opens": Mutation(
        "router/admission.py", "return is_bearer and any(matches)", "return is_bearer", _ROUTER + "test_refusals.py::test_api_keys"
    ),
    "any-model-joins": Mutation(
        "router/compatibility.py",
        "if found := differences(info, reference.info):",
        "if found := ():",
        _ROUTER + "test_routing.py::test_incompatible_workers_are_refused_with_both_values",
    ),
    "flush-into-the-dead": Mutation(
        "pd_serve/transport/ucx/one_sided.py",
        "elif not self._is_alive():",
        "elif False:",
        "tests/unit/transport/ucx/test_one_sided.py::test_an_ok_flush_into_the_memory_of_a_dead_process_is_no_delivery",
    ),
    "dead-process-knocked-at": Mutation(
        "pd_serve/transport/ucx/joining.py",
        "if is_local and not node.fences.watch(peer_id, metadata.process):",
        "if is_local and not node.fences.watch(peer_id, metadata.process) and False:",
        _UCX + "test_identity.py::test_metadata_of_a_dead_local_process_is_refused_at_once",
    ),
    "any-receiver": Mutation(
        "pd_serve/transport/ucx/joining.py",
        "if hello.receiver != node.settings.self_id:",
        "if False:",
        _UCX + "test_identity.py::test_stale_metadata_of_a_restarted_target_writes_nothing_and_is_told",
    ),
    "any-digest": Mutation(
        "pd_serve/transport/ucx/messages.py",
        "hmac.compare_digest(self._digest(payload), data[:DIGEST_NBYTES])",
        "True",
        _UCX + "test_identity.py::test_a_stranger_writes_nothing_joins_nothing_and_crashes_nothing",
    ),
    **BOUNDS,
    **ROUTING,
}


def survives(mutation: Mutation) -> str:
    """Empty when the test fails as it must, else why that cannot be said."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = Path(folder)
        for package in _PACKAGES:
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _FILES:
            shutil.copy(ROOT / name, copy / name)
        path = copy / mutation.path
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            return f"{mutation.path} has the line {text.count(mutation.old)} times"
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation.test]
        run = subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True, timeout=300)
        tail = "\n".join(run.stdout.splitlines()[-3:])
        return "" if run.returncode == 1 and "failed" in tail else f"exit status {run.returncode}: {tail}"


def main(names: list[str]) -> int:
    num_survivors = 0
    for name in names or list(MUTATIONS):
        problem = survives(MUTATIONS[name])
        print(f"{name}: {problem or 'found'}", flush=True)
        num_survivors += bool(problem)
    return num_survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
