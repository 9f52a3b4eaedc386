"""Phi-3's fused matrices under the names that models/llama.py asks for."""

from __future__ import annotations

from torch import Tensor

from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.weights import Part, WeightSource


class SplitWeights:
    """A WeightSource: rows of `qkv_proj` as q_proj, k_proj and v_proj, rows of `gate_up_proj` as gate_proj and up_proj."""

    def __init__(self, info: ModelInfo, weights: WeightSource) -> None:
        query_size, kv_size, mlp_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim, info.intermediate_size
        self._weights = weights
        self._parts = {
            "q_proj": ("qkv_proj", 0, query_size + 2 * kv_size),
            "k_proj": ("qkv_proj", query_size, query_size + 2 * kv_size),
            "v_proj": ("qkv_proj", query_size + kv_size, query_size + 2 * kv_size),
            "gate_proj": ("gate_up_proj", 0, 2 * mlp_size),
            "up_proj": ("gate_up_proj", mlp_size, 2 * mlp_size),
        }
        """Name of a projection: matrix that holds it, first of its rows, rows in all."""

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See WeightSource."""
        owner, _, kind = name.rpartition(".")
        path, _, projection = owner.rpartition(".")
        if projection not in self._parts:
            return self._weights.get(name, shape, part)
        fused, first, num_rows = self._parts[projection]
        rows = range(shape[0]) if part is None else part.indices
        own = Part(0, range(first + rows.start, first + rows.stop))
        return self._weights.get(f"{path}.{fused}.{kind}", (num_rows, *shape[1:]), own)
