"""Predicted time to first token, in seconds, from what was measured. Pure; docs/routing.md has the formulas.

    wait      = prompt tokens ahead of it / tokens per second that the worker computes
    compute   = tokens it has not in its cache / the same
    transfer  = KV bytes that decode has not / bytes per second between the two
    at decode = wait + max(compute, transfer) + min(compute, transfer) / layers

The last line is a pipeline of as many stages as layers: KV goes out layer by layer while the next is computed.
"""

from __future__ import annotations

from router.policy.base import Demand, WorkerView

PRIOR_BANDWIDTH = 2.5e9
"""Bytes per second of a pair whose lane was not measured: shared memory and 25 Gb/s networks are near it."""


def compute_s(worker: WorkerView, demand: Demand) -> float:
    return demand.num_uncached(worker.peer) / worker.prefill_tokens_per_s


def wait_s(worker: WorkerView) -> float:
    return worker.prefill_backlog_tokens / worker.prefill_tokens_per_s


def transfer_s(prefill: WorkerView, decode: WorkerView, demand: Demand) -> float:
    bandwidth = prefill.bandwidths.get(decode.peer, 0.0) or PRIOR_BANDWIDTH
    return demand.num_uncached(decode.peer) * decode.kv_bytes_per_token / bandwidth


def local_ttft_s(decode: WorkerView, demand: Demand) -> float:
    """Of a prompt that is computed where it decodes."""
    return wait_s(decode) + compute_s(decode, demand)


def remote_ttft_s(prefill: WorkerView, decode: WorkerView, demand: Demand) -> float:
    """Of a prompt that one computes and sends to the other, the hand-over not counted."""
    compute, transfer = compute_s(prefill, demand), transfer_s(prefill, decode, demand)
    return wait_s(prefill) + max(compute, transfer) + min(compute, transfer) / prefill.num_layers
