"""Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentInfo:
    """The cache keeps of each token one vector for all heads: a latent of `kv_rank`, and `rope_head_dim` rotated elements."""

    query_rank: int
    """0: queries are not compressed."""
    kv_rank: int
    nope_head_dim: int
    """Of a query head, the part without positions."""
    rope_head_dim: int
    value_head_dim: int
    is_interleaved: bool
    """Rotary pairs are neighbours in the checkpoint, rather than halves apart."""
    query_scale: float
