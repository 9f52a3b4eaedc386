"""What one rank of several holds of a model: consecutive query heads, the KV heads they read, and a slice of the MLP. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.engine.families import deepseek, gemma3, llama, moe, phi3
from pd_serve.engine.model_info import ModelInfo
from pd_serve.kv.routes import rank_heads

_SHARED_OUT = frozenset((*llama.ARCHITECTURES, *moe.ARCHITECTURES, *deepseek.ARCHITECTURES, *gemma3.ARCHITECTURES, *phi3.ARCHITECTURES))
"""Architectures whose module computes a rank's share; the others take one rank."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of rank `rank` of `num_ranks`. Precondition: the degree is one of degrees(info)."""

    rank: int
    num_ranks: int

    def of(self, total: int) -> range:
        """Its part of `total` things that are shared out evenly, in order."""
        each = total // self.num_ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def of_kv_heads(self, total: int) -> range:
        """As `of`; with more ranks than heads, neighbours hold the same one."""
        return rank_heads(total, self.num_ranks, self.rank)

    @property
    def is_first(self) -> bool:
        """It holds what must be counted once: the biases of summed outputs, the head and the sampler."""
        return self.rank == 0


def scaled(heads: range, head_dim: int) -> range:
    """The elements that the heads take up among those of all heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def degrees(info: ModelInfo) -> tuple[int, ...]:
    """Numbers of ranks that the model can be shared out to, ascending; 1 among them."""
    if info.architecture not in _SHARED_OUT:
        return (1,)
    num_kv_heads, sizes = info.kv_shape.num_heads, mlp_sizes(info)
    return tuple(
        degree
        for degree in range(1, info.num_heads + 1)
        if info.num_heads % degree == 0
        and not any(size % degree for size in sizes)
        and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)
    )


def mlp_sizes(info: ModelInfo) -> tuple[int, ...]:
    """Intermediate elements of every kind of MLP in the model: each rank has a slice of each, of every expert too."""
    experts = info.experts
    if experts is None:
        return (info.intermediate_size,)
    plain = (info.intermediate_size,) if len(experts.sparse_layers) < info.num_layers else ()
    shared = (experts.shared_intermediate_size,) if experts.shared_intermediate_size else ()
    return (*plain, experts.intermediate_size, *shared)
