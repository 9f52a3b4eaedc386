"""Root-mean-square norm in few operations.

In a decode step the weights stream through the caches, and each tiny operation costs more than its arithmetic: about 20 us when cold.
torch's own rms_norm is about ten of them on CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, arXiv:1910.07467), computed in float32.

    Written as x / sqrt(|x|^2 + n eps) * (sqrt(n) weight), which is the same. Only exactly rounded functions, so that a row's result is
    the same in a kernel's vector loop and in its scalar tail: it must not depend on how many rows there are.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        """`weight` [..., size]: one vector, or one per head. Results are of its dtype. `offset` is added to it in float32 (Gemma stores
        weights less one)."""
        size = weight.shape[-1]
        self._dtype = weight.dtype
        self.scaled_weight = (weight.float() + offset) * math.sqrt(size)
        self.floor = size * eps

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, ..., size] in any float type; a new tensor of the weight's dtype."""
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, 2, -1, True)
        # In double: float32's square root is another one for many rows than for few, and rounds otherwise.
        length = norm.double().square_().add_(self.floor).sqrt_().float()
        unit = wide / length if wide is x else wide.div_(length)
        return unit.mul_(self.scaled_weight).to(self._dtype)
