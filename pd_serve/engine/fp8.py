"""8-bit floats that share a power of two as their scale (OCP Microscaling Formats v1.0: E4M3 elements, E8M0 scales). Pure tensors.

A power of two as scale costs no bit of precision, and multiplying by it is exact: what is stored is read back to the very same values by
every process, in whatever type.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0
"""Of E4M3."""
_BIAS = 127
_NOT_A_NUMBER = 255
"""As a scale: multiplies as an infinity."""


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values` [..., n] of any float type to (elements [..., n] float8_e4m3fn, scales [...] uint8: biased exponents).

    The scale is the least power of two that brings the largest of the n values within E4M3; where one of them is no number, all are none.
    """
    wide = values.float()
    largest = wide.abs().amax(-1) / _LARGEST
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp_(1 - _BIAS, _BIAS)
    exponent = torch.where(largest.isfinite(), exponent, _NOT_A_NUMBER - _BIAS)
    # The inverse of the scale, exact too; made of bits because ldexp takes longer than all the rest. Of what is no number: infinite.
    inverse = ((_BIAS - exponent) << 23).view(torch.float32)
    return (wide * inverse[..., None]).to(torch.float8_e4m3fn), (exponent + _BIAS).to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """Biased exponents [...] uint8 to the float32 powers of two."""
    return (scales.to(torch.int32) << 23).view(torch.float32)


def dequantize_into(elements: Tensor, scales: Tensor, target: Tensor) -> None:
    """`elements` [..., n] float8_e4m3fn, `scales` [...], to `target` [..., n] of any wider float type."""
    target.copy_(elements)
    target.mul_(scale_values(scales)[..., None])
