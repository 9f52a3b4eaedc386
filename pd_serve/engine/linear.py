"""A linear layer whose result for a row does not depend on how many other rows are computed with it.

On CPU the weight is repacked once into oneDNN's blocked order, 2 to 3.5 times faster than the plain one (measured on one thread).
Those operators are private to torch: where they are missing or refuse a type, torch's public linear is used, slower and otherwise equal.

Rule: one row alone takes another kernel that sums in another order (a matrix-vector product), so a single row is padded to two. A whole
step of one token is better given as two rows from the start (step_inputs.py does).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS_HINT = 16
"""Batch size that oneDNN packs for; one packed copy serves every batch size."""


class Linear:
    """y = x W^T + b. Takes the weight over: on CPU only the packed copy is kept, which is opaque (no slicing, no saving)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [num_outputs, num_inputs], `bias` [num_outputs]."""
        packed = _pack(weight) if weight.device.type == "cpu" else None
        self._is_packed = packed is not None
        self._weight = weight if packed is None else packed
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]."""
        if x.shape[0] == 1:
            return self._apply(x.expand(2, -1).contiguous())[:1]
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        if self._is_packed:
            return _linear_packed(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None where this torch or this processor cannot."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        _linear_packed(weight.new_zeros(2, weight.shape[1]), packed, None)
    except (AttributeError, RuntimeError):
        return None
    return packed
