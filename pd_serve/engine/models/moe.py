"""A mixture of experts: a router gives every token a few experts and their weights; their outputs are summed. And which layer has one.

A token's result depends on no other token: its experts are chosen by its own scores, each expert computes its rows by the rules of
linear.py (decode rows apart from prefill rows), and a token's outputs are summed in the order of the experts' numbers, in float32.

Sources: Mixtral (arXiv:2401.04088), Qwen3 (arXiv:2505.09388), DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from pd_serve.engine.experts_info import PLAIN_NAMES, ExpertNames, ExpertsInfo, Scoring
from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.models.mlp import FeedForward, GatedMLP, MlpShape, load_mlp
from pd_serve.engine.parallel_shares import Share
from pd_serve.engine.weights import WeightSource


class Router:
    def __init__(self, info: ExpertsInfo, gate: Linear, bias: Tensor | None) -> None:
        """`gate` maps hidden states to a logit per expert, in float32 where `info` says so; `bias` [num_experts] float32."""
        self._info = info
        self._gate = gate
        self._bias = bias

    def __call__(self, x: Tensor, num_decode_rows: int) -> tuple[Tensor, Tensor]:
        """[num_rows, hidden_size] to weights [num_rows, num_chosen] float32, and the experts' numbers, of the same shape."""
        info = self._info
        logits = self._gate(x.float() if info.has_float32_router else x, num_decode_rows).float()
        scores = logits.softmax(-1) if info.scoring is Scoring.SOFTMAX else _sigmoid(logits)
        merits = self._within_groups(scores if self._bias is None else scores + self._bias)
        chosen = merits.topk(info.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if info.is_normalized:
            weights = weights / (_row_sums(weights) + 1e-20)[:, None]
        return weights * info.scaling, chosen

    def _within_groups(self, merits: Tensor) -> Tensor:
        """Merits of experts outside a token's best groups become -inf."""
        info = self._info
        if info.num_groups == info.num_chosen_groups:
            return merits
        grouped = merits.view(merits.shape[0], info.num_groups, -1)
        num_judged = 1 if info.scoring is Scoring.SOFTMAX else 2
        judged = _row_sums(grouped.topk(num_judged, dim=-1).values)
        best = judged.topk(info.num_chosen_groups, dim=-1).indices
        is_out = torch.ones(grouped.shape[:2], dtype=torch.bool, device=merits.device).scatter_(1, best, False)
        return grouped.masked_fill(is_out[..., None], float("-inf")).view(merits.shape)


def _sigmoid(logits: Tensor) -> Tensor:
    """As softmax of (logit, 0). torch's own sigmoid rounds the last elements of a tensor otherwise than the others, so that a row's bits
    would depend on how many rows there are (seen in float32)."""
    return torch.stack((logits, torch.zeros_like(logits)), dim=-1).softmax(-1)[..., 0]


def _row_sums(x: Tensor) -> Tensor:
    """Over the last dimension, from its first element to its last in every row."""
    return reduce(torch.add, x.unbind(-1))


class SparseMLP:
    """See FeedForward."""

    def __init__(self, router: Router, experts: Sequence[GatedMLP], shared: GatedMLP | None) -> None:
        self._router = router
        self._experts = tuple(experts)
        self._shared = shared

    def __call__(self, x: Tensor, num_decode_rows: int, residual: Tensor | None = None) -> Tensor:
        weights, chosen = self._router(x, num_decode_rows)
        num_chosen, num_experts = chosen.shape[1], len(self._experts)
        # Choices by expert, each expert's in the order of rows: decode's stay in front.
        order = chosen.flatten().argsort(stable=True)
        rows, sorted_weights = order // num_chosen, weights.flatten()[order][:, None]
        counts = chosen.flatten().bincount(minlength=num_experts)
        decode_counts = chosen[:num_decode_rows].flatten().bincount(minlength=num_experts)
        inputs = x.index_select(0, rows)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        first = 0
        for expert, count, decode_count in zip(self._experts, counts.tolist(), decode_counts.tolist(), strict=True):
            if count:
                own = slice(first, first + count)
                total.index_add_(0, rows[own], expert(inputs[own], decode_count).float() * sorted_weights[own])
                first += count
        out = total.to(x.dtype)
        if self._shared is not None:
            out = out + self._shared(x, num_decode_rows)
        return out if residual is None else residual + out


def load_feed_forward(info: ModelInfo, weights: WeightSource, linears: LinearFactory, share: Share, layer: int) -> FeedForward:
    """The rank's share of the layer's MLP, or of every expert: results of the ranks are to be summed.

    Raises ModelError where a tensor is missing or has another shape than `info` says."""
    prefix = f"model.layers.{layer}."

    def load(own: str, size: int, names: ExpertNames = PLAIN_NAMES, *, has_bias: bool = False) -> GatedMLP:
        shape = MlpShape(info.hidden_size, size, has_bias)
        return load_mlp(weights, linears, share, shape, (f"{own}.{names.gate}", f"{own}.{names.up}", f"{own}.{names.down}"))

    experts = info.experts
    if experts is None or layer not in experts.sparse_layers:
        return load(f"{prefix}mlp", info.intermediate_size, has_bias=info.has_mlp_bias)
    names = experts.names
    block = f"{prefix}{names.block}."
    gate = weights.get(f"{block}gate.weight", (experts.num_experts, info.hidden_size))
    bias = None
    if experts.scoring is Scoring.SIGMOID_BIASED:
        bias = weights.get(f"{block}gate.e_score_correction_bias", (experts.num_experts,))
    shared = None
    if experts.shared_intermediate_size:
        shared = load(f"{block}shared_experts", experts.shared_intermediate_size, has_bias=info.has_mlp_bias)
    return SparseMLP(
        Router(experts, linears.make(gate.float() if experts.has_float32_router else gate), bias),
        [load(f"{block}experts.{number}", experts.intermediate_size, names) for number in range(experts.num_experts)],
        shared,
    )
