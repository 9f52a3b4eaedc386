"""Rotary position embedding (Su et al., arXiv:2104.09864) and its extensions to longer contexts.

Computed in float32 in the order of operations that transformers uses, so that angles are bit-equal with those the model was trained with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pd_serve.engine.rope import RopeParams, RopeType


class RotaryTable:
    """Cosine and signed sine of every position, [max_len, 1, head_dim], in the model's dtype.

    With halves x = (a, b) of a head, the rotation (a cos - b sin, b cos + a sin) is x * cosine + roll(x, head_dim / 2) * signed sine, where
    the signed sine is (-sin, sin): two element-wise operations and no concatenation.
    """

    def __init__(self, params: RopeParams, head_dim: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        positions = torch.arange(max_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(params, head_dim))
        cosine, sine = angles.cos() * params.attention_factor, angles.sin() * params.attention_factor
        self.cosine = torch.cat((cosine, cosine), dim=-1)[:, None].to(dtype).to(device)
        self.signed_sine = torch.cat((-sine, sine), dim=-1)[:, None].to(dtype).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of `positions` [num_tokens], each [num_tokens, 1, head_dim]: once per step, for all layers."""
        return self.cosine.index_select(0, positions), self.signed_sine.index_select(0, positions)


def rotate_(heads: Tensor, cosine: Tensor, signed_sine: Tensor) -> None:
    """Turn `heads` [num_tokens, num_heads, head_dim] by the angles of their tokens, in place."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cosine).addcmul_(swapped, signed_sine)


def inverse_frequencies(params: RopeParams, head_dim: int) -> Tensor:
    """Radians per token of each pair of dimensions, [head_dim / 2] float32."""
    base = 1.0 / (params.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if params.rope_type is RopeType.LINEAR:
        return base / params.factor
    if params.rope_type is RopeType.LLAMA3:
        return _llama3(base, params)
    if params.rope_type is RopeType.YARN:
        return _yarn(base, params, head_dim)
    return base


def _llama3(base: Tensor, params: RopeParams) -> Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    blend = (params.original_max_len / wavelength - params.low_freq_factor) / (params.high_freq_factor - params.low_freq_factor)
    kept = blend.clamp(0.0, 1.0)
    return (1 - kept) * base / params.factor + kept * base


def _yarn(base: Tensor, params: RopeParams, head_dim: int) -> Tensor:
    """YaRN (Peng et al., arXiv:2309.00071), section 3.2: a ramp between interpolated and kept frequencies."""

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(params.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(params.theta))

    low, high = dimension_of(params.beta_fast), dimension_of(params.beta_slow)
    if params.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The smallest ramp that does not divide by zero.
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / params.factor * (1 - kept) + base * kept
