"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share: grouped-query attention with rotary positions, and a gated MLP.

Computes all tokens of a step at once, whatever sequences they belong to; only attention knows sequences. q, k and v are one matrix, so are
gate and up; q and k are rotated together. Owned by the engine thread, called by the runner.

Sources: Llama (arXiv:2302.13971), Qwen2 (biases on q, k, v; arXiv:2407.10671), Qwen3 (norms on q and k per head; arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import AttentionBackend, PlanT
from pd_serve.engine.kv_cache import KVCache
from pd_serve.engine.linear import Linear
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.rotary import RotaryTable, rotate
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import WeightSource

LayerHook = Callable[[int], None]
"""Called with a layer's index as soon as its keys and values of the whole step are written, before its attention."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel(Generic[PlanT]):
    def __init__(self, info: ModelInfo, weights: WeightSource, rotary: RotaryTable, attention: AttentionBackend[PlanT]) -> None:
        """Raises ModelError where a tensor is missing or has another shape than `info` says."""
        self._info = info
        self._rotary = rotary
        self._attention = attention
        self._embedding = weights.get("model.embed_tokens.weight", (info.vocab_size, info.hidden_size))
        self._layers = tuple(_load_layer(info, weights, f"model.layers.{index}.") for index in range(info.num_layers))
        self._norm = weights.get("model.norm.weight", (info.hidden_size,))
        head = self._embedding if info.has_tied_embeddings else weights.get("lm_head.weight", (info.vocab_size, info.hidden_size))
        self._head = Linear(head)

    def forward(self, inputs: StepInputs, cache: KVCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """Write the step's keys and values into `cache`; return logits of the sampled rows, [num_sampled, vocab_size], in row order."""
        info = self._info
        num_tokens = inputs.token_ids.shape[0]
        num_rotated = info.num_heads + info.num_kv_heads
        cosine, signed_sine = self._rotary.at(inputs.positions)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            projected = layer.qkv(self._normalize(hidden, layer.input_norm)).view(num_tokens, -1, info.head_dim)
            heads = projected[:, :num_rotated]
            if layer.query_norm is not None and layer.key_norm is not None:
                queries = self._normalize(heads[:, : info.num_heads], layer.query_norm)
                keys = self._normalize(heads[:, info.num_heads :], layer.key_norm)
                heads = torch.cat((queries, keys), dim=1)
            heads = rotate(heads, cosine, signed_sine)
            cache.write(index, inputs.kv_rows, heads[:, info.num_heads :], projected[:, num_rotated:])
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(heads[:, : info.num_heads], cache.layer(index), plan)
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._normalize(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        if not inputs.sampled_entries:
            return hidden.new_empty(0, info.vocab_size)
        sampled = hidden if inputs.sampled_rows is None else hidden.index_select(0, inputs.sampled_rows)
        return self._head(self._normalize(sampled, self._norm))

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self._info.norm_eps)


def _load_layer(info: ModelInfo, weights: WeightSource, prefix: str) -> _Layer:
    query_size, kv_size = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    hidden_size, mlp_size = info.hidden_size, info.intermediate_size

    def fused(names: Sequence[str], num_outputs: Sequence[int], num_inputs: int, *, has_bias: bool) -> Linear:
        """Several projections of one input as one matrix."""
        sizes = tuple(zip(names, num_outputs, strict=True))
        weight = torch.cat([weights.get(f"{prefix}{name}.weight", (size, num_inputs)) for name, size in sizes])
        bias = torch.cat([weights.get(f"{prefix}{name}.bias", (size,)) for name, size in sizes]) if has_bias else None
        return Linear(weight, bias)

    def norm(name: str, size: int) -> Tensor:
        return weights.get(f"{prefix}{name}.weight", (size,))

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return _Layer(
        input_norm=norm("input_layernorm", hidden_size),
        qkv=fused(qkv_names, (query_size, kv_size, kv_size), hidden_size, has_bias=info.has_qkv_bias),
        query_norm=norm("self_attn.q_norm", info.head_dim) if info.has_qk_norm else None,
        key_norm=norm("self_attn.k_norm", info.head_dim) if info.has_qk_norm else None,
        output=fused(("self_attn.o_proj",), (hidden_size,), query_size, has_bias=info.has_output_bias),
        mlp_norm=norm("post_attention_layernorm", hidden_size),
        gate_up=fused(("mlp.gate_proj", "mlp.up_proj"), (mlp_size, mlp_size), hidden_size, has_bias=info.has_mlp_bias),
        down=fused(("mlp.down_proj",), (hidden_size,), mlp_size, has_bias=info.has_mlp_bias),
    )
