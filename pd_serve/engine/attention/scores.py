"""Attention by explicit scores, in float32, for what torch's fused kernel does not know: softcaps and sinks.

One sequence at a time, so that no product's shape depends on the company (base.py, rule 2). Called by the CPU attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScoreRule:
    scale: float
    softcap: float
    """0: none."""
    sinks: Tensor | None
    """[num_heads, num_queries or 1, 1] float32."""


def attend_by_scores(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: ScoreRule) -> Tensor:
    """`queries` [num_sequences, num_heads, num_queries, head_dim], `keys` and `values` [num_sequences, num_heads, num_keys, head_dim],
    `mask` [num_sequences, 1, 1 or num_queries, num_keys] or without the second dimension, 0 or -inf. Returns the queries' shape and type.
    """
    parts = [_attend_one(*one, rule) for one in zip(queries.float(), keys.float(), values.float(), mask.float(), strict=True)]
    return torch.stack(parts).to(queries.dtype)


def _attend_one(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, rule: ScoreRule) -> Tensor:
    scores = queries @ keys.transpose(1, 2) * rule.scale
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    scores = scores + mask
    if rule.sinks is None:
        return torch.softmax(scores, -1) @ values
    sinks = rule.sinks.expand(*scores.shape[:2], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1] @ values
