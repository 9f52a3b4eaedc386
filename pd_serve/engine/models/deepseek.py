"""The decoder of DeepSeek-V2 and V3: latents in the cache (latent_attention.py), experts behind the first layers (moe.py).

Computes all tokens of a step at once, as models/llama.py does. Of several ranks each caches every latent whole, and computes its heads and
its slice of every MLP; outputs are summed after attention and after the MLP. Owned by the engine thread, called by the runner.

Sources: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import AttentionBackend, PlanT
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.linear import LinearFactory
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.latent_attention import LatentProjections, load_projections
from pd_serve.engine.models.llama import LayerHook
from pd_serve.engine.models.mlp import FeedForward
from pd_serve.engine.models.moe import load_feed_forward
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.parallel import Collective
from pd_serve.engine.parallel_shares import Share
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    attention: LatentProjections
    mlp_norm: RMSNorm
    mlp: FeedForward


class DeepseekModel(Generic[PlanT]):
    def __init__(
        self, info: ModelInfo, weights: WeightSource, rotary: RotaryTable, attention: AttentionBackend[PlanT], group: Collective
    ) -> None:
        """`info` is of the whole model and has latents, `attention` is of the rank's heads.

        Raises ModelError where a tensor is missing or has another shape than `info` says.
        """
        assert info.latent is not None, "no latents: models/llama.py computes it"
        self._info = info
        self._group = group
        self._rotary = rotary
        self._attention = attention
        share = Share(group.rank, group.num_ranks)
        linears = LinearFactory()
        self._embedding = weights.get("model.embed_tokens.weight", (info.vocab_size, info.hidden_size))
        self._layers = tuple(_load_layer(info, info.latent, weights, linears, share, index) for index in range(info.num_layers))
        self._norm = RMSNorm(weights.get("model.norm.weight", (info.hidden_size,)), info.norm_eps)
        self._head = linears.make(self._head_weight(weights)) if share.is_first else None
        linears.settle()

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """Write the step's latents into `cache`; return logits of the sampled rows, [num_sampled, vocab_size], in row order."""
        num_decode, all_reduce = inputs.num_decode_rows, self._group.all_reduce
        cosine, signed_sine = self._rotary.at(inputs.positions)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        rows = cache.rows(inputs.slots)
        for index, layer in enumerate(self._layers):
            latents, source = layer.attention.latents(layer.input_norm(hidden), num_decode, cosine, signed_sine)
            cache.write(index, rows, latents)
            if on_layer is not None:
                on_layer(index)
            queries = layer.attention.queries(source, num_decode, cosine, signed_sine)
            attended = self._attention.attend(queries[: inputs.num_tokens], cache.layer(index), plan)
            if attended.shape[0] != hidden.shape[0]:
                attended = torch.cat((attended, attended))
            hidden = hidden + all_reduce(layer.attention.outputs(attended, num_decode))
            hidden = hidden + all_reduce(layer.mlp(layer.mlp_norm(hidden), num_decode))
        if not inputs.sampled_entries:
            return self._embedding.new_empty(0, self._info.vocab_size)
        sampled = self._norm(hidden.index_select(0, inputs.sampled_rows))
        assert self._head is not None, "only the first rank has a head"
        return self._head(sampled, sampled.shape[0])

    def _head_weight(self, weights: WeightSource) -> Tensor:
        if self._info.has_tied_embeddings:
            return self._embedding
        return weights.get("lm_head.weight", (self._info.vocab_size, self._info.hidden_size))


def _load_layer(info: ModelInfo, latent: LatentInfo, weights: WeightSource, linears: LinearFactory, share: Share, index: int) -> _Layer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.get(f"model.layers.{index}.{name}.weight", (info.hidden_size,)), info.norm_eps)

    return _Layer(
        input_norm=norm("input_layernorm"),
        attention=load_projections(info, latent, weights, linears, share, index),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=load_feed_forward(info, weights, linears, share, index),
    )
