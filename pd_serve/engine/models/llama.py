"""The decoder that Llama, Mistral, Mixtral, Qwen2 and Qwen3 share: grouped-query attention with rotary positions, a gated MLP or experts.

Computes all tokens of a step at once, whatever sequences they belong to; only attention knows sequences. q, k and v are one matrix;
q and k are rotated together, in place. Owned by the engine thread, called by the runner.

Of several ranks each computes its heads and its slice of the MLP for all tokens; outputs are summed after attention and after the MLP.

Sources: Llama (arXiv:2302.13971), Qwen2 (biases on q, k, v; arXiv:2407.10671), Qwen3 (norms on q and k per head; arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import FULL, AttentionBackend, LayerRule, PlanT
from pd_serve.engine.attention.native import NativeAttention, NativePlan
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.glue import glue_for
from pd_serve.engine.models.mlp import FeedForward
from pd_serve.engine.models.moe import load_feed_forward
from pd_serve.engine.models.native_step import NativeStep, layer_parts
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.native.decoder import DecoderParts
from pd_serve.engine.native.operators import Operators
from pd_serve.engine.parallel import Collective
from pd_serve.engine.parallel_shares import Share, scaled
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import Part, WeightSource

LayerHook = Callable[[int], None]
"""Called with a layer's index as soon as its keys and values of the whole step are written, before its attention."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    qkv: Linear
    query_key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: FeedForward


class LlamaModel(Generic[PlanT]):
    def __init__(
        self,
        info: ModelInfo,
        weights: WeightSource,
        rotary: RotaryTable,
        attention: AttentionBackend[PlanT],
        operators: Operators | None,
        group: Collective,
    ) -> None:
        """`info` is of the whole model, `attention` of the rank's heads, `operators` compiled ones for its decode rows.

        Raises ModelError where a tensor is missing or has another shape than `info` says.
        """
        self._info = info
        self._group = group
        share = Share(group.rank, group.num_ranks)
        self._num_heads = len(share.of(info.num_heads))
        self._num_kv_heads = len(share.of_kv_heads(info.num_kv_heads))
        self._rotary = rotary
        self._attention = attention
        self._glue = glue_for(operators)
        self._rules = tuple(LayerRule(window) for window in info.layer_windows or (FULL,) * info.num_layers)
        self._embedding = weights.get("model.embed_tokens.weight", (info.vocab_size, info.hidden_size))
        linears = LinearFactory(operators)
        self._layers = tuple(_LayerLoader(info, weights, linears, share, index).load() for index in range(info.num_layers))
        self._norm = RMSNorm(weights.get("model.norm.weight", (info.hidden_size,)), info.norm_eps)
        self._head = linears.make(self._head_weight(weights)) if share.is_first else None
        linears.settle()
        self._decode = self._native_step(operators)

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """Write the step's keys and values into `cache`; return logits of the sampled rows, [num_sampled, vocab_size], in row order."""
        info, glue = self._info, self._glue
        num_rows = inputs.token_ids.shape[0]
        num_decode = inputs.num_decode_rows
        num_heads, all_reduce = self._num_heads, self._group.all_reduce
        num_rotated = num_heads + self._num_kv_heads
        # What every rank has a part of is summed before it is added.
        is_alone = self._group.num_ranks == 1
        if self._decode is not None and on_layer is None and isinstance(plan, NativePlan) and plan.prefill is None:
            hidden = F.embedding(inputs.token_ids[: inputs.num_tokens], self._embedding)
            self._decode.run_(hidden, inputs, cache, plan)
            return self._logits(hidden, inputs)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        place = glue.placement(inputs, self._rotary, cache, num_heads)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(glue.norm(hidden, layer.input_norm), num_decode).view(num_rows, -1, info.head_dim)
            if layer.query_key_norm is not None:
                glue.norm_heads_(heads[:, :num_rotated], layer.query_key_norm)
            place(index, heads)
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(heads[: inputs.num_tokens, :num_heads], cache.layer(index), plan, self._rules[index])
            if num_rows != inputs.num_tokens:
                attended = torch.cat((attended, attended))
            if is_alone:
                hidden = layer.output(attended, num_decode, hidden)
                hidden = layer.mlp(glue.norm(hidden, layer.mlp_norm), num_decode, hidden)
            else:
                hidden = hidden + all_reduce(layer.output(attended, num_decode))
                hidden = hidden + all_reduce(layer.mlp(glue.norm(hidden, layer.mlp_norm), num_decode))
        return self._logits(hidden, inputs)

    def _logits(self, hidden: Tensor, inputs: StepInputs) -> Tensor:
        if not inputs.sampled_entries:
            return self._embedding.new_empty(0, self._info.vocab_size)
        sampled = self._glue.norm(hidden.index_select(0, inputs.sampled_rows), self._norm)
        assert self._head is not None, "only the first rank has a head"
        return self._head(sampled, sampled.shape[0])

    def _native_step(self, operators: Operators | None) -> NativeStep | None:
        """Where a layer is nothing but compiled operators."""
        layers = [layer_parts(layer, rule.window) for layer, rule in zip(self._layers, self._rules, strict=True)]
        parts = tuple(layer for layer in layers if layer is not None)
        if operators is None or len(parts) < len(layers) or self._group.num_ranks > 1 or not isinstance(self._attention, NativeAttention):
            return None
        first = self._layers[0]
        head_norm_floor = first.query_key_norm.floor if first.query_key_norm is not None else 0.0
        turns = self._rotary.cosine, self._rotary.signed_sine
        decoder = DecoderParts(parts, self._info.hidden_size, first.input_norm.floor, head_norm_floor, turns)
        return NativeStep(operators, decoder, self._attention)

    def _head_weight(self, weights: WeightSource) -> Tensor:
        if self._info.has_tied_embeddings:
            return self._embedding
        return weights.get("lm_head.weight", (self._info.vocab_size, self._info.hidden_size))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Of a projection: how many the whole model has, and which of them the rank computes."""

    total: int
    own: range


class _LayerLoader:
    """Reads the rank's share of one layer."""

    def __init__(self, info: ModelInfo, weights: WeightSource, linears: LinearFactory, share: Share, index: int) -> None:
        self._info = info
        self._weights = weights
        self._linears = linears
        self._share = share
        self._index = index
        self._prefix = f"model.layers.{index}."

    def load(self) -> _Layer:
        info, size = self._info, self._info.head_dim
        query = _Outputs(info.num_heads * size, scaled(self._share.of(info.num_heads), size))
        key = _Outputs(info.num_kv_heads * size, scaled(self._share.of_kv_heads(info.num_kv_heads), size))
        return _Layer(
            input_norm=self._norm("input_layernorm"),
            qkv=self._split({"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}, has_bias=info.has_qkv_bias),
            query_key_norm=self._query_key_norm() if info.has_qk_norm else None,
            output=self._summed("self_attn.o_proj", query, has_bias=info.has_output_bias),
            mlp_norm=self._norm("post_attention_layernorm"),
            mlp=load_feed_forward(info, self._weights, self._linears, self._share, self._index),
        )

    def _split(self, projections: Mapping[str, _Outputs], *, has_bias: bool) -> Linear:
        """Several projections of one input, as one matrix: the rank's outputs of each."""
        weights, prefix = self._weights, self._prefix
        outputs = [(f"{prefix}{name}", part.total, Part(0, part.own)) for name, part in projections.items()]
        weight = torch.cat([weights.get(f"{name}.weight", (total, self._info.hidden_size), part) for name, total, part in outputs])
        bias = torch.cat([weights.get(f"{name}.bias", (total,), part) for name, total, part in outputs]) if has_bias else None
        return self._linears.make(weight, bias)

    def _summed(self, name: str, inputs: _Outputs, *, has_bias: bool) -> Linear:
        """A projection of what the ranks have split: their results are summed, so that only one of them adds the bias."""
        shape = (self._info.hidden_size, inputs.total)
        weight = self._weights.get(f"{self._prefix}{name}.weight", shape, Part(1, inputs.own))
        bias = self._weights.get(f"{self._prefix}{name}.bias", shape[:1]) if has_bias and self._share.is_first else None
        return self._linears.make(weight, bias)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._weights.get(f"{self._prefix}{name}.weight", (self._info.hidden_size,)), self._info.norm_eps)

    def _query_key_norm(self) -> RMSNorm:
        """One norm of [num_heads + num_kv_heads, head_dim] weights: the same vector for each query head, another for each key head."""
        info, share, prefix = self._info, self._share, self._prefix
        num_heads, num_kv_heads = len(share.of(info.num_heads)), len(share.of_kv_heads(info.num_kv_heads))
        query = self._weights.get(f"{prefix}self_attn.q_norm.weight", (info.head_dim,)).expand(num_heads, -1)
        key = self._weights.get(f"{prefix}self_attn.k_norm.weight", (info.head_dim,)).expand(num_kv_heads, -1)
        return RMSNorm(torch.cat((query, key)), info.norm_eps)
