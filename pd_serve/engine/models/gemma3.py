"""Gemma 3, text only: local and global layers, norms around each block, scaled embeddings. Owned by the engine thread.

Differs from Llama (models/llama.py) in: norms whose weights are stored less one; norms before and behind attention and MLP; norms on q and
k; one rotary table for layers with a window and another for those without; GELU; embeddings times sqrt(hidden_size).
Source: Gemma 3 report (arXiv:2503.19786).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import FULL, AttentionBackend, LayerRule, PlanT
from pd_serve.engine.families.gemma3 import Gemma3Info
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.models.llama import LayerHook
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable, rotate_
from pd_serve.engine.parallel import Collective
from pd_serve.engine.parallel_shares import Share, scaled
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.engine.weights import Part, WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    rule: LayerRule
    input_norm: RMSNorm
    qkv: Linear
    query_key_norm: RMSNorm
    output: Linear
    attention_norm: RMSNorm
    """Of what attention adds."""
    mlp_input_norm: RMSNorm
    gate_up: Linear
    down: Linear
    mlp_norm: RMSNorm
    """Of what the MLP adds."""


class Gemma3Model(Generic[PlanT]):
    def __init__(
        self,
        info: Gemma3Info,
        weights: WeightSource,
        rotaries: tuple[RotaryTable, RotaryTable],
        attention: AttentionBackend[PlanT],
        group: Collective,
    ) -> None:
        """`info` is of the whole model, `attention` of the rank's heads; `rotaries`: of layers without a window and of those with one.

        Raises ModelError where a tensor is missing or has another shape than `info` says.
        """
        self._info = info
        self._group = group
        share = Share(group.rank, group.num_ranks)
        self._num_heads = len(share.of(info.num_heads))
        self._num_kv_heads = len(share.of_kv_heads(info.num_kv_heads))
        self._rotaries = rotaries
        self._attention = attention
        self._embedding = weights.get("model.embed_tokens.weight", (info.vocab_size, info.hidden_size))
        self._embedding_scale = torch.tensor(math.sqrt(info.hidden_size), dtype=self._embedding.dtype, device=self._embedding.device)
        linears = LinearFactory()
        windows = info.layer_windows or (FULL,) * info.num_layers
        self._layers = tuple(_load_layer(info, weights, linears, share, (index, window)) for index, window in enumerate(windows))
        self._norm = RMSNorm(weights.get("model.norm.weight", (info.hidden_size,)), info.norm_eps, offset=1.0)
        self._head = linears.make(self._head_weight(weights)) if share.is_first else None
        linears.settle()

    def forward(self, inputs: StepInputs, cache: PagedCache, plan: PlanT, on_layer: LayerHook | None) -> Tensor:
        """See DecoderModel."""
        info = self._info
        num_heads, all_reduce = self._num_heads, self._group.all_reduce
        num_rows, num_decode = inputs.token_ids.shape[0], inputs.num_decode_rows
        turns = [rotary.at(inputs.positions) for rotary in self._rotaries]
        hidden = F.embedding(inputs.token_ids, self._embedding) * self._embedding_scale
        rows = cache.rows(inputs.slots)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.input_norm(hidden), num_decode).view(num_rows, -1, info.head_dim)
            rotated = heads[:, : num_heads + self._num_kv_heads]
            rotated.copy_(layer.query_key_norm(rotated))
            rotate_(rotated, *turns[layer.rule.window != FULL])
            cache.write(index, rows, heads[:, num_heads:])
            if on_layer is not None:
                on_layer(index)
            attended = self._attention.attend(heads[: inputs.num_tokens, :num_heads], cache.layer(index), plan, layer.rule)
            if num_rows != inputs.num_tokens:
                attended = torch.cat((attended, attended))
            hidden = hidden + layer.attention_norm(all_reduce(layer.output(attended, num_decode)))
            gate, up = layer.gate_up(layer.mlp_input_norm(hidden), num_decode).chunk(2, dim=-1)
            hidden = hidden + layer.mlp_norm(all_reduce(layer.down(F.gelu(gate, approximate="tanh").mul_(up), num_decode)))
        if not inputs.sampled_entries:
            return self._embedding.new_empty(0, info.vocab_size)
        sampled = self._norm(hidden.index_select(0, inputs.sampled_rows))
        assert self._head is not None, "only the first rank has a head"
        logits = self._head(sampled, sampled.shape[0])
        return torch.tanh(logits / info.final_softcap) * info.final_softcap if info.final_softcap else logits

    def _head_weight(self, weights: WeightSource) -> Tensor:
        if self._info.has_tied_embeddings:
            return self._embedding
        return weights.get("lm_head.weight", (self._info.vocab_size, self._info.hidden_size))


def _load_layer(info: Gemma3Info, weights: WeightSource, linears: LinearFactory, share: Share, place: tuple[int, int]) -> _Layer:
    """The rank's share. `place`: index and window."""
    index, window = place
    prefix, size, hidden_size = f"model.layers.{index}.", info.head_dim, info.hidden_size
    own_heads, own_kv_heads = share.of(info.num_heads), share.of_kv_heads(info.num_kv_heads)
    query = (info.num_heads * size, scaled(own_heads, size))
    key = (info.num_kv_heads * size, scaled(own_kv_heads, size))
    mlp = (info.intermediate_size, share.of(info.intermediate_size))

    def split(names: Sequence[str], outputs: Sequence[tuple[int, range]], *, has_bias: bool = False) -> Linear:
        """Several projections of one input as one matrix: (outputs in all, the rank's) of each."""
        parts = [(f"{prefix}{name}", total, Part(0, own)) for name, (total, own) in zip(names, outputs, strict=True)]
        weight = torch.cat([weights.get(f"{name}.weight", (total, hidden_size), part) for name, total, part in parts])
        bias = torch.cat([weights.get(f"{name}.bias", (total,), part) for name, total, part in parts]) if has_bias else None
        return linears.make(weight, bias)

    def summed(name: str, inputs: tuple[int, range], *, has_bias: bool = False) -> Linear:
        """A projection of what the ranks have split; one of them adds the bias."""
        weight = weights.get(f"{prefix}{name}.weight", (hidden_size, inputs[0]), Part(1, inputs[1]))
        bias = weights.get(f"{prefix}{name}.bias", (hidden_size,)) if has_bias and share.is_first else None
        return linears.make(weight, bias)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.get(f"{prefix}{name}.weight", (hidden_size,)), info.norm_eps, offset=1.0)

    query_norm = weights.get(f"{prefix}self_attn.q_norm.weight", (size,)).expand(len(own_heads), -1)
    key_norm = weights.get(f"{prefix}self_attn.k_norm.weight", (size,)).expand(len(own_kv_heads), -1)
    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return _Layer(
        rule=LayerRule(window),
        input_norm=norm("input_layernorm"),
        qkv=split(qkv_names, (query, key, key), has_bias=info.has_qkv_bias),
        query_key_norm=RMSNorm(torch.cat((query_norm, key_norm)), info.norm_eps, offset=1.0),
        output=summed("self_attn.o_proj", query, has_bias=info.has_output_bias),
        attention_norm=norm("post_attention_layernorm"),
        mlp_input_norm=norm("pre_feedforward_layernorm"),
        gate_up=split(("mlp.gate_proj", "mlp.up_proj"), (mlp, mlp)),
        down=summed("mlp.down_proj", mlp),
        mlp_norm=norm("post_feedforward_layernorm"),
    )
