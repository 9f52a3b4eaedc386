"""Worker models without a worker: the roofline of published peaks times an efficiency. What was measured on a system like it is better.

    prefill step    overhead + n (2 x active parameters) / FLOP/s + attention's pairs / FLOP/s
    decode step     overhead + weights / bytes/s  + KV of the context / bytes/s + (2 x active parameters) / FLOP/s for each sequence

A layer with a window of w sees at most w tokens: beyond it, its share is linear in a prompt and constant in a decoding sequence. Of
experts, all weights are read (a batch touches nearly all of them) and only the active ones compute. What TP ranks tell each other is not in
it: choose the efficiency accordingly. Sources: S. Williams, A. Waterman, D. Patterson, "Roofline" (2009); R. Pope et al., "Efficiently
Scaling Transformer Inference" (2022), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import Accelerator
from pd_serve.plan.shape import ModelShape
from pd_serve.plan.worker_model import WorkerModel


@dataclass(frozen=True, slots=True)
class Assumed:
    """What no data sheet says."""

    kv_dtype: KVDtype = KVDtype.BFLOAT16
    weight_nbytes: float = 2.0
    """Of one parameter: 1 for fp8."""
    memory_share: float = 0.9
    """Of the memory, for weights and KV."""
    overhead_s: float = 0.001
    """Of each step: launching it, choosing the next."""
    handover_s: float = 0.003
    """Reserving, the first push, the last notice. Source: pd-serve's own on one host, docs/benchmarks.md."""
    request_s: float = 0.003
    max_batch_tokens: int = 8192
    max_running: int = 256


USUAL = Assumed()


def modelled(shape: ModelShape, hardware: Accelerator, tp: int, efficiency: float, assumed: Assumed = USUAL) -> WorkerModel:
    """A worker of `tp` accelerators that reach `efficiency` of their peaks, in arithmetic and in memory. Raises PlanError where the model
    does not fit or cannot be shared out so."""
    if tp < 1 or not 0 < efficiency <= 1:
        raise PlanError(f"tp {tp}, efficiency {efficiency:g}: expected at least 1, and above 0 up to 1")
    flop_per_s = hardware.bf16_flop_per_s * tp * efficiency
    bytes_per_s = hardware.memory_bytes_per_s * efficiency
    rank_kv_nbytes = shape.rank_bytes_per_token(assumed.kv_dtype, tp)
    rank_weights = shape.num_params * assumed.weight_nbytes / tp
    num_kv_tokens = int((hardware.memory_nbytes * assumed.memory_share - rank_weights) // rank_kv_nbytes)
    if num_kv_tokens < 1:
        raise PlanError(
            f"{shape.name} does not fit on {tp} x {hardware.name}: {rank_weights / 1e9:.0f} GB of weights each, in "
            f"{hardware.memory_nbytes * assumed.memory_share / 1e9:.0f} GB"
        )
    pair_flop = 2 * (shape.query_dim + shape.value_dim) * shape.num_heads
    windows = shape.layer_windows or (0,) * shape.num_layers
    num_whole, in_windows = windows.count(0), sum(windows)
    layer_kv_s = rank_kv_nbytes / shape.num_layers / bytes_per_s
    return WorkerModel(
        name=f"{shape.name}, {hardware.name} x{tp} (published peaks at {100 * efficiency:.0f} %)",
        num_gpus=tp,
        prefill=(
            assumed.overhead_s,
            (shape.flop_per_token + pair_flop * in_windows) / flop_per_s,
            # Of n tokens each sees those before it: n^2 / 2 pairs.
            pair_flop * num_whole / 2 / flop_per_s,
        ),
        decode=(
            assumed.overhead_s + rank_weights / bytes_per_s,
            layer_kv_s * num_whole,
            layer_kv_s * in_windows + shape.flop_per_token / flop_per_s,
        ),
        num_kv_tokens=num_kv_tokens,
        kv_bytes_per_token=shape.sent_bytes_per_token(assumed.kv_dtype, tp),
        num_layers=shape.num_layers,
        max_batch_tokens=assumed.max_batch_tokens,
        max_running=assumed.max_running,
        handover_s=assumed.handover_s,
        request_s=assumed.request_s,
    )
