"""From a model folder and the config to a ready ModelRunner, in two moves so that the KV pool can be allocated between them.

plan = plan_engine(path, config)                  cheap: reads config.json and safetensors headers
region = transport.allocate_pool(plan.layout.pool_nbytes)
runner = load_runner(plan, region.buffer, clock)  reads the weights
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from pd_serve.clock import Clock
from pd_serve.config import Config, KVConfig
from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.families.registry import describe
from pd_serve.engine.kv_cache import open_kv_cache
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.registry import build_model
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.sampler import Sampler
from pd_serve.engine.weights import CheckpointWeights, RandomWeights, WeightSource
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder

_RANDOM_SEED = 0
"""Of load_format `random`: every worker must draw the same weights."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What will be built: known before any weight is read."""

    path: Path
    info: ModelInfo
    layout: KVLayout
    dtype: torch.dtype
    """Of weights and activations; KV is of the same or of a smaller one."""
    device: torch.device
    max_len: int
    """Longest prompt + output served, tokens."""
    has_random_weights: bool


def plan_engine(path: Path, config: Config) -> EnginePlan:
    """Raises ModelError for a model that cannot be served, ConfigError for settings that do not fit it or this machine."""
    is_random = config.model.load_format == "random"
    info = describe(path, has_weights=not is_random)
    if config.model.max_len > info.max_len:
        raise ConfigError(f"model.max_len {config.model.max_len} is beyond the model's {info.max_len} tokens")
    device = _device(config.engine.device)
    layout = KVLayout(
        num_layers=info.num_layers,
        num_kv_heads=info.kv_shape.num_heads,
        head_dim=info.kv_shape.head_dim,
        block_size=config.kv.block_size,
        num_blocks=1,
        dtype=KVDtype(config.model.dtype if config.kv.dtype == "auto" else config.kv.dtype),
        num_planes=info.kv_shape.num_planes,
        order=KVOrder(config.kv.order),
    )
    dtype = torch_dtype(config.model.dtype)
    num_blocks = config.kv.num_blocks or _pool_budget_nbytes(config.kv, info, dtype, device) // layout.pool_nbytes
    if num_blocks < 1:
        raise ConfigError(f"the KV pool has no room for a single block of {layout.pool_nbytes} bytes")
    return EnginePlan(
        path=path,
        info=info,
        layout=msgspec.structs.replace(layout, num_blocks=num_blocks),
        dtype=dtype,
        device=device,
        max_len=config.model.max_len or info.max_len,
        has_random_weights=is_random,
    )


def load_runner(plan: EnginePlan, buffer: memoryview | None, clock: Clock, extra_nbytes: int = 0) -> ModelRunner[Any]:
    """Read the weights and build the runner over `buffer` (the region that the transport allocated; None: memory of its own, with
    `extra_nbytes` behind the pool).

    Call on the engine thread. Raises ModelError, ConfigError.
    """
    info, device, dtype = plan.info, plan.device, plan.dtype
    cache = open_kv_cache(plan.layout, buffer, device, dtype, extra_nbytes)
    weights: WeightSource
    if plan.has_random_weights:
        weights = RandomWeights(_RANDOM_SEED, dtype, device)
    else:
        weights = CheckpointWeights(Checkpoint.open(plan.path), dtype, device)
    with torch.inference_mode():
        model, attention = build_model(info, weights, plan.layout.block_size, plan.max_len, dtype, device)
    return ModelRunner(model, attention, cache, Sampler(info.eos_token_ids), device, clock)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device here")
    return torch.device(name)


def _pool_budget_nbytes(kv: KVConfig, info: ModelInfo, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return kv.memory_bytes
    free_nbytes, _ = torch.cuda.mem_get_info(device)
    return math.floor(kv.gpu_memory_fraction * free_nbytes) - _num_parameters(info) * dtype.itemsize


def _num_parameters(info: ModelInfo) -> int:
    """Of the matrices, which are all but a thousandth."""
    attention = info.hidden_size * info.head_dim * (2 * info.num_heads + 2 * info.num_kv_heads)
    mlp = 3 * info.hidden_size * info.intermediate_size
    num_embeddings = 1 if info.has_tied_embeddings else 2
    return info.num_layers * (attention + mlp) + num_embeddings * info.vocab_size * info.hidden_size
