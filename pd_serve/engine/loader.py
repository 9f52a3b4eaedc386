"""From a model folder and the config to a ready ModelRunner, in two moves so that the KV pool can be allocated between them.

group = open_group(...)                                  only where several ranks share the model
plan = plan_engine(path, config, group)                  cheap: reads config.json and safetensors headers
region = transport.allocate_pool(plan.layout.pool_nbytes)
runner = load_runner(plan, region.buffer, clock, group=group)  reads the rank's share of the weights
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from pd_serve.clock import Clock
from pd_serve.config import Config, KVConfig
from pd_serve.engine.attention.base import LatentSettings
from pd_serve.engine.attention.registry import reads_in_place
from pd_serve.engine.attention.varlen import VarlenAttention
from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.cuda_graphs import CudaCapturer
from pd_serve.engine.device_sampler import DeviceSampler
from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.families.registry import describe
from pd_serve.engine.grammar import GrammarMasks, TokenSet
from pd_serve.engine.graphs import GraphedDecode, GraphSettings, can_be_captured
from pd_serve.engine.kv_cache import open_kv_cache
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.registry import build_model
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.native.choice import open_operators
from pd_serve.engine.parallel import Collective, SingleRank, check_degree
from pd_serve.engine.parameters import num_parameters
from pd_serve.engine.runner import ModelRunner, TokenSampler
from pd_serve.engine.sampler import Sampler
from pd_serve.engine.weights import CheckpointWeights, RandomWeights, WeightSource
from pd_serve.errors import ConfigError
from pd_serve.grammar.compiler import Vocabulary, has_vocabulary
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from pd_serve.kv.routes import rank_heads

_RANDOM_SEED = 0
"""Of load_format `random`: every worker must draw the same weights."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What will be built: known before any weight is read."""

    path: Path
    info: ModelInfo
    layout: KVLayout
    """Equal on all ranks."""
    dtype: torch.dtype
    """Of weights and activations; KV is of the same or of a smaller one."""
    device: torch.device
    max_len: int
    """Longest prompt + output served, tokens."""
    rank: int
    num_ranks: int
    """That share the model out: `layout` is of one of them, `info` of the whole."""
    has_random_weights: bool
    graph_rows: int = 0
    """Rows of the largest decode step that is captured (graphs.py); 0: none is."""
    latent_attention: str = "auto"
    """As in EngineConfig."""
    cpu_ops: str = "off"
    """As in EngineConfig."""
    cache_dir: str = ""
    """As in ModelConfig."""
    grammar_threads: int = 1
    """As structured.threads."""

    @property
    def has_grammars(self) -> bool:
        """Answers can be made to keep to one: the tokens' texts are known, and one that ends."""
        return bool(self.info.eos_token_ids) and has_vocabulary(self.path)

    @property
    def num_idle_blocks(self) -> int:
        """The pool's last ones, which no sequence may have: captured steps write their idle rows there."""
        return 1 if self.graph_rows else 0


def plan_engine(path: Path, config: Config, group: Collective | None = None) -> EnginePlan:
    """`group`: of engine.tp ranks, which must all call this; None: one rank.

    Raises ModelError for a model that cannot be served, ConfigError for settings that do not fit it or this machine.
    """
    group = group or SingleRank()
    if config.engine.tp != group.num_ranks:
        raise ConfigError(f"engine.tp is {config.engine.tp}, but there are {group.num_ranks} ranks")
    is_random = config.model.load_format == "random"
    info = describe(path, has_weights=not is_random)
    if config.model.max_len > info.max_len:
        raise ConfigError(f"model.max_len {config.model.max_len} is beyond the model's {info.max_len} tokens")
    check_degree(info, group.num_ranks)
    device = choose_device(config.engine.device)
    if config.kv.dtype == "fp8_e4m3" and reads_in_place(info.kv_shape.num_planes, device):
        raise ConfigError(
            f"kv.dtype fp8_e4m3 is not supported on {device.type}: its attention reads the KV pool in place (set kv.dtype auto)"
        )
    layout = KVLayout(
        num_layers=info.num_layers,
        num_kv_heads=len(rank_heads(info.kv_shape.num_heads, group.num_ranks, group.rank)),
        head_dim=info.kv_shape.head_dim,
        block_size=config.kv.block_size,
        num_blocks=1,
        dtype=KVDtype(config.model.dtype if config.kv.dtype == "auto" else config.kv.dtype),
        num_planes=info.kv_shape.num_planes,
        order=KVOrder(config.kv.order),
    )
    dtype = torch_dtype(config.model.dtype)
    num_blocks = config.kv.num_blocks
    if not num_blocks:
        budget_nbytes = _pool_budget_nbytes(config.kv, num_parameters(info, group.num_ranks), dtype, device)
        # GPUs may differ in what is free; blocks have the same numbers on all ranks.
        num_blocks = group.minimum(budget_nbytes // layout.pool_nbytes)
    if num_blocks < 1:
        raise ConfigError(f"the KV pool has no room for a single block of {layout.pool_nbytes} bytes")
    has_graphs = config.engine.cuda_graphs and device.type == "cuda" and num_blocks > 1 and can_be_captured(info, group.num_ranks)
    return EnginePlan(
        path=path,
        info=info,
        layout=msgspec.structs.replace(layout, num_blocks=num_blocks),
        dtype=dtype,
        device=device,
        max_len=config.model.max_len or info.max_len,
        rank=group.rank,
        num_ranks=group.num_ranks,
        has_random_weights=is_random,
        graph_rows=config.engine.max_running if has_graphs else 0,
        latent_attention=config.engine.latent_attention,
        cpu_ops=config.engine.cpu_ops,
        cache_dir=config.model.cache_dir,
        grammar_threads=config.structured.threads,
    )


def load_runner(
    plan: EnginePlan, buffer: memoryview | None, clock: Clock, extra_nbytes: int = 0, group: Collective | None = None
) -> ModelRunner[Any]:
    """Read the rank's weights and build the runner over `buffer` (the region that the transport allocated; None: memory of its own, with
    `extra_nbytes` behind the pool). `group`: the one that the plan was made with, which stays the caller's to close.

    Call on the engine thread. Raises ModelError, ConfigError.
    """
    group = group or SingleRank()
    assert (plan.rank, plan.num_ranks) == (group.rank, group.num_ranks), "the plan was made for another group"
    info, device, dtype = plan.info, plan.device, plan.dtype
    cache = open_kv_cache(plan.layout, buffer, device, dtype, extra_nbytes)
    weights: WeightSource
    if plan.has_random_weights:
        weights = RandomWeights(_RANDOM_SEED, dtype, device)
    else:
        weights = CheckpointWeights(Checkpoint.open(plan.path), dtype, device)
    operators = open_operators(plan.cpu_ops, plan.layout, dtype, device, plan.cache_dir)
    with torch.inference_mode():
        latents = LatentSettings(plan.latent_attention, plan.layout.dtype.has_scales)
        settings = BuildSettings(plan.layout.block_size, plan.max_len, dtype, device, group, latents, operators)
        model, attention = build_model(info, weights, settings)
    sampler = _sampler(info, device) if settings.share.is_first else None
    runner = ModelRunner(model, attention, cache, sampler, device, clock)
    if sampler is not None and plan.has_grammars:
        open_vocabulary = partial(Vocabulary.of_folder, plan.path, info.vocab_size, info.eos_token_ids)
        runner.grammars = GrammarMasks(open_vocabulary, TokenSet(info.vocab_size, info.eos_token_ids), plan.grammar_threads, clock)
    if plan.graph_rows:
        assert isinstance(attention, VarlenAttention), "can_be_captured() leaves no other"
        graph_settings = GraphSettings(plan.graph_rows, plan.layout.num_blocks - 1, plan.max_len, device)
        graphs = GraphedDecode(model, attention, cache, CudaCapturer(device), graph_settings)
        graphs.warm_up()
        runner.use_graphs(graphs)
    return runner


def _sampler(info: ModelInfo, device: torch.device) -> TokenSampler:
    return DeviceSampler(info.eos_token_ids, device) if device.type == "cuda" else Sampler(info.eos_token_ids)


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device here")
    return torch.device(name)


def _pool_budget_nbytes(kv: KVConfig, num_weights: int, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return kv.memory_bytes
    free_nbytes, _ = torch.cuda.mem_get_info(device)
    return math.floor(kv.gpu_memory_fraction * free_nbytes) - num_weights * dtype.itemsize
