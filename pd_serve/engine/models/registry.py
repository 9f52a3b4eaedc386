"""Which module computes which architecture. Each is imported only where it is used."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pd_serve.engine.attention.base import FULL, AttentionBackend, AttentionGeometry
from pd_serve.engine.attention.registry import attention_for
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.llama import LayerHook, LlamaModel
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import WeightSource

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)


class DecoderModel(Protocol[PlanT_contra]):
    """What the runner drives."""

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT_contra, on_layer: LayerHook | None) -> Tensor:
        """Write the step's KV into `cache`, calling `on_layer` for every layer between that and its attention; return logits of the
        sampled rows, [num_sampled, vocab_size], in row order."""
        ...


def build_model(
    info: ModelInfo, weights: WeightSource, block_size: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[DecoderModel[Any], AttentionBackend[Any]]:
    """The model, and the attention that plans its steps.

    Raises ModelError where a tensor is missing or has another shape than `info` says.
    """
    geometry = AttentionGeometry(info.num_heads, info.num_kv_heads, info.head_dim, block_size, max_len, windows=windows_of(info))
    attention = attention_for(geometry, dtype, device)
    rotary = RotaryTable(info.rope, info.head_dim, max_len, dtype, device)
    return LlamaModel(info, weights, rotary, attention), attention


def windows_of(info: ModelInfo) -> tuple[int, ...]:
    """Every window that some layer has."""
    return tuple(sorted(set(info.layer_windows))) or (FULL,)
