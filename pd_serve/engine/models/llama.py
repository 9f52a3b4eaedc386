"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: grouped-query attention with rotary positions, and a gated MLP.

Computes all tokens of a step at once, whatever sequences they belong to; only attention knows sequences. q, k and v are one matrix, so are
gate and up; q and k are rotated together, in place. Owned by the engine thread, called by the runner.

Sources: Llama (arXiv:2302.13971), Qwen2 (biases on q, k, v; arXiv:2407.10671), Qwen3 (norms on q and k per head; arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import FULL, AttentionBackend, LayerRule, PlanT
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable, rotate_
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import WeightSource

LayerHook = Callable[[int], None]
"""Called with a layer's index as soon as its keys and values of the whole step are written, before its attention."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    qkv: Linear
    query_key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class LlamaModel(Generic[PlanT]):
    def __init__(self, info: ModelInfo, weights: WeightSource, rotary: RotaryTable, attention: AttentionBackend[PlanT]) -> None:
        """Raises ModelError where a tensor is missing or has another shape than `info` says."""
        self._info = info
        self._rotary = rotary
        self._attention = attention
        self._rules = tuple(LayerRule(window) for window in info.layer_windows or (FULL,) * info.num_layers)
        self._embedding = weights.get("model.embed_tokens.weight", (info.vocab_size, info.hidden_size))
        linears = LinearFactory()
        self._layers = tuple(_load_layer(info, weights, linears, index) for index in range(info.num_layers))
        self._norm = RMSNorm(weights.get("model.norm.weight", (info.hidden_size,)), info.norm_eps)
        head = self._embedding if info.has_tied_embeddings else weights.get("lm_head.weight", (info.vocab_size, info.hidden_size))
        self._head = linears.make(head)

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """Write the step's keys and values into `cache`; return logits of the sampled rows, [num_sampled, vocab_size], in row order."""
        info = self._info
        num_rows = inputs.token_ids.shape[0]
        num_decode = inputs.num_decode_rows
        num_rotated = info.num_heads + info.num_kv_heads
        cosine, signed_sine = self._rotary.at(inputs.positions)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        rows = cache.rows(inputs.slots)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.input_norm(hidden), num_decode).view(num_rows, -1, info.head_dim)
            rotated = heads[:, :num_rotated]
            if layer.query_key_norm is not None:
                rotated.copy_(layer.query_key_norm(rotated))
            rotate_(rotated, cosine, signed_sine)
            cache.write(index, rows, heads[:, info.num_heads :])
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(heads[: inputs.num_tokens, : info.num_heads], cache.layer(index), plan, self._rules[index])
            if num_rows != inputs.num_tokens:
                attended = torch.cat((attended, attended))
            hidden = hidden + layer.output(attended, num_decode)
            gate, up = layer.gate_up(layer.mlp_norm(hidden), num_decode).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up), num_decode)
        if not inputs.sampled_entries:
            return self._embedding.new_empty(0, info.vocab_size)
        sampled = self._norm(hidden.index_select(0, inputs.sampled_rows))
        return self._head(sampled, sampled.shape[0])


def _load_layer(info: ModelInfo, weights: WeightSource, linears: LinearFactory, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    query_size, kv_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    hidden_size, mlp_size = info.hidden_size, info.intermediate_size

    def fused(names: Sequence[str], num_outputs: Sequence[int], num_inputs: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix."""
        sizes = tuple(zip(names, num_outputs, strict=True))
        weight = torch.cat([weights.get(f"{prefix}{name}.weight", (size, num_inputs)) for name, size in sizes])
        bias = torch.cat([weights.get(f"{prefix}{name}.bias", (size,)) for name, size in sizes]) if has_bias else None
        return linears.make(weight, bias)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.get(f"{prefix}{name}.weight", (hidden_size,)), info.norm_eps)

    def query_key_norm() -> RMSNorm:
        """One norm of [num_heads + num_kv_heads, head_dim] weights: the same vector for each query head, another for each key head."""
        query = weights.get(f"{prefix}self_attn.q_norm.weight", (info.head_dim,)).expand(info.num_heads, -1)
        key = weights.get(f"{prefix}self_attn.k_norm.weight", (info.head_dim,)).expand(info.num_kv_heads, -1)
        return RMSNorm(torch.cat((query, key)), info.norm_eps)

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=fused(qkv_names, (query_size, kv_size, kv_size), hidden_size, has_bias=info.has_qkv_bias),
        query_key_norm=query_key_norm() if info.has_qk_norm else None,
        output=fused(("self_attn.o_proj",), (hidden_size,), query_size, has_bias=info.has_output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), (mlp_size, mlp_size), hidden_size, has_bias=info.has_mlp_bias),
        down=fused(("mlp.down_proj",), (hidden_size,), mlp_size, has_bias=info.has_mlp_bias),
    )
