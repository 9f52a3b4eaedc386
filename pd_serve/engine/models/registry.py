"""Which module computes which architecture. Each is imported only where it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pd_serve.engine.attention.base import FULL, AttentionBackend, AttentionGeometry
from pd_serve.engine.attention.registry import attention_for
from pd_serve.engine.families import phi3
from pd_serve.engine.families.fallback import FallbackInfo
from pd_serve.engine.families.gemma3 import Gemma3Info
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.llama import LayerHook, LlamaModel
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import WeightSource

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)


class DecoderModel(Protocol[PlanT_contra]):
    """What the runner drives."""

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT_contra, on_layer: LayerHook | None) -> Tensor:
        """Write the step's KV into `cache`, calling `on_layer` for every layer between that and its attention; return logits of the
        sampled rows, [num_sampled, vocab_size], in row order; with several ranks, all of them call it, and only the first may ask for
        rows."""
        ...


def build_model(info: ModelInfo, weights: WeightSource, settings: BuildSettings) -> tuple[DecoderModel[Any], AttentionBackend[Any]]:
    """The rank's part of the model, and the attention that plans its steps.

    Raises ModelError where a tensor is missing or has another shape than `info` says.
    """
    if isinstance(info, FallbackInfo):
        from pd_serve.engine.models.fallback_load import build_fallback

        return build_fallback(info, weights, settings)
    if isinstance(info, Gemma3Info):
        return _build_gemma3(info, weights, settings)
    if info.latent is not None:
        return _build_deepseek(info, info.latent, weights, settings)
    if info.architecture in phi3.ARCHITECTURES:
        from pd_serve.engine.models.phi3 import SplitWeights

        weights = SplitWeights(info, weights)
    attention = attention_for(geometry_of(info, settings), settings.dtype, settings.device, operators=settings.operators)
    rotary = RotaryTable(info.rope, info.head_dim, settings.max_len, settings.dtype, settings.device)
    return LlamaModel(info, weights, rotary, attention, settings.operators, settings.group), attention


def geometry_of(info: ModelInfo, settings: BuildSettings) -> AttentionGeometry:
    """Of the rank's heads, with the windows that `info` names."""
    return AttentionGeometry(
        num_heads=len(settings.share.of(info.num_heads)),
        num_kv_heads=len(settings.share.of_kv_heads(info.num_kv_heads)),
        head_dim=info.head_dim,
        block_size=settings.block_size,
        max_len=settings.max_len,
        windows=tuple(sorted(set(info.layer_windows))) or (FULL,),
    )


def _build_deepseek(
    info: ModelInfo, latent: LatentInfo, weights: WeightSource, settings: BuildSettings
) -> tuple[DecoderModel[Any], AttentionBackend[Any]]:
    from pd_serve.engine.models.deepseek import DeepseekModel

    geometry = replace(geometry_of(info, settings), query_scale=latent.query_scale, num_planes=1, latent_rank=latent.kv_rank)
    attention = attention_for(geometry, settings.dtype, settings.device, settings.latents)
    rotary = RotaryTable(info.rope, latent.rope_head_dim, settings.max_len, settings.dtype, settings.device)
    return DeepseekModel(info, weights, rotary, attention, settings.group), attention


def _build_gemma3(info: Gemma3Info, weights: WeightSource, settings: BuildSettings) -> tuple[DecoderModel[Any], AttentionBackend[Any]]:
    from pd_serve.engine.models.gemma3 import Gemma3Model

    geometry = replace(geometry_of(info, settings), query_scale=info.query_scale)
    attention = attention_for(geometry, settings.dtype, settings.device, operators=settings.operators)
    rotaries = (
        RotaryTable(info.rope, info.head_dim, settings.max_len, settings.dtype, settings.device),
        RotaryTable(info.local_rope, info.head_dim, settings.max_len, settings.dtype, settings.device),
    )
    return Gemma3Model(info, weights, rotaries, attention, settings.group), attention
