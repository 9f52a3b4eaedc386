"""Linear layers whose result for a row does not depend on how many other rows are computed with it.

On CPU the weight is repacked once into oneDNN's blocked order, 2 to 3.5 times faster than the plain one (measured on one thread). Those
operators are private to torch: where they are missing or refuse a type, and on CUDA, torch's public linear is used. That one is not
invariant: the promise of bit-identical logits is for packed layers, the promise of identical float32 tokens for all.

What is done with a product anyway is done before it is rounded (Fusion): fewer operators, and fewer roundings.

Where there are compiled operators, decode rows of 16-bit layers go to them (native/linear.cpp), which read the same packed weights.

What oneDNN's kernels do, and the rule that follows (all measured):
  one row alone    is a matrix-vector product that sums in another order: it is padded to two.
  AMX, 16 bits     32 rows or fewer sum in one order, more in another, and for wide inputs the count of rows matters again. So decode rows
                   go through calls of at most 32, prefill rows through calls of 64 rows and of such multiples as a probe at load time
                   found to agree with 64. As in attention: a row's kernel depends on its phase, not on its company.
  everything else  two or more rows: one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.huge_pages import use_huge_pages
from pd_serve.engine.native.operators import Fusion, Operators, PackedWeight

_PACK_ROWS_HINT = 16
"""Batch size that oneDNN packs for; one packed copy serves every batch size."""
DECODE_ROWS = 32
_PREFILL_ROWS = 64
ROW_STEP = 16
"""More rows than decode's are padded to a multiple. oneDNN compiles and keeps a kernel of half a megabyte per weight and count of rows, and
replaces them when it has 1,024: over all counts up to 512 the process grew by 2 GiB and did not stop (measured, float32)."""
_PREFILL_CANDIDATES = (512, 256, 128)
_PROBE_SEED = 0


Apply = Callable[[Tensor, Tensor | None], Tensor]
"""Maps x [num_rows >= 2, num_inputs] and what is fused with the product, [num_rows, num_outputs]."""


@dataclass(frozen=True, slots=True)
class NativeProduct:
    """By the compiled operator."""

    operators: Operators
    weight: PackedWeight
    fusion: Fusion

    def apply(self, x: Tensor, other: Tensor | None) -> Tensor:
        return self.operators.linear(self.weight, x, other, self.fusion)


class Linear:
    """y = x W^T + b, and what is fused with it. Made by LinearFactory."""

    def __init__(self, apply: Apply, prefill_sizes: tuple[int, ...], native: NativeProduct | None = None) -> None:
        """`prefill_sizes`: counts of rows that prefill may use, descending, empty: any. `native`: for decode's rows, any count
        of them; None: `apply`, by the rules above."""
        self.native = native
        self._apply = apply
        self._prefill_sizes = prefill_sizes
        self._decode = None if native is None else native.apply

    def __call__(self, x: Tensor, num_decode_rows: int, other: Tensor | None = None) -> Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]; the first `num_decode_rows` are decode's, the others prefill's.

        `other` [num_rows, num_outputs]: the factor of Fusion.TIMES; for Fusion.NONE, what is added.
        """
        num_rows = x.shape[0]
        if self._decode is not None and num_decode_rows == num_rows:
            return self._decode(x, other)
        is_one_call = not self._prefill_sizes or (num_rows == num_decode_rows and num_rows <= DECODE_ROWS)
        if is_one_call and (self._decode is None or not num_decode_rows):
            return self._padded(x, other)
        others = (None, None) if other is None else (other[:num_decode_rows], other[num_decode_rows:])
        parts = (self._decode_parts(x[:num_decode_rows], others[0]), self._prefill_parts(x[num_decode_rows:], others[1]))
        return torch.cat([*parts[0], *parts[1]])

    def _decode_parts(self, x: Tensor, other: Tensor | None) -> Iterator[Tensor]:
        if x.shape[0] and self._decode is not None:
            yield self._decode(x, other)
            return
        for first in range(0, x.shape[0], DECODE_ROWS):
            rows = slice(first, first + DECODE_ROWS)
            yield self._padded(x[rows], None if other is None else other[rows])

    def _prefill_parts(self, x: Tensor, other: Tensor | None) -> Iterator[Tensor]:
        first, num_rows = 0, x.shape[0]
        if num_rows and not self._prefill_sizes:
            yield self._padded(x, other)
            return
        while first < num_rows:
            size = next((size for size in self._prefill_sizes if size <= num_rows - first), self._prefill_sizes[-1])
            rows = slice(first, first + size)
            yield self._padded(x[rows], None if other is None else other[rows], size)
            first += size

    def _padded(self, x: Tensor, other: Tensor | None, num_rows: int = 2) -> Tensor:
        """By a call of at least so many rows."""
        missing = num_rows - x.shape[0]
        if missing <= 0:
            return self._apply(x, other)
        return self._apply(F.pad(x, (0, 0, 0, missing)), None if other is None else F.pad(other, (0, 0, 0, missing)))[:-missing]


class LinearFactory:
    """Packs weights; probes each shape once."""

    def __init__(self, operators: Operators | None = None) -> None:
        self._operators = operators
        self._probed: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}
        self._readable: dict[tuple[torch.Size, torch.dtype], bool] = {}
        self._packed: list[Tensor] = []

    def make(self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = Fusion.NONE) -> Linear:
        """`weight` [num_outputs, num_inputs], `bias` [num_outputs]. On CPU only the packed copy is kept: opaque, no slicing, no saving."""
        packed = _pack(weight) if weight.device.type == "cpu" else None
        if packed is None:
            return Linear(lambda x, other: _fused(F.linear(x, weight, bias), other, fusion), ())
        self._packed.append(packed)

        def apply(x: Tensor, other: Tensor | None) -> Tensor:
            missing = -x.shape[0] % ROW_STEP if x.shape[0] > DECODE_ROWS else 0
            if not missing:
                return _linear_packed(x, packed, bias, other, fusion)
            padded = None if other is None else F.pad(other, (0, 0, 0, missing))
            return _linear_packed(F.pad(x, (0, 0, 0, missing)), packed, bias, padded, fusion)[:-missing]

        sizes = self._prefill_sizes(lambda x: apply(x, None), weight, weight.shape[1]) if _counts_matter(weight.dtype) else ()
        return Linear(apply, sizes, self._native(weight, packed, bias, fusion))

    def settle(self) -> None:
        """To be called when all layers have been made: moves packed weights onto huge pages."""
        use_huge_pages((torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)) for packed in self._packed)
        self._packed.clear()

    def _native(self, weight: Tensor, packed: Tensor, bias: Tensor | None, fusion: Fusion) -> NativeProduct | None:
        """The compiled operator for decode's rows, if it can read `packed`."""
        operators, key = self._operators, (weight.shape, weight.dtype)
        if operators is None or not operators.takes(weight):
            return None
        if key not in self._readable:
            self._readable[key] = operators.can_read(weight, packed)
        if not self._readable[key]:
            return None
        return NativeProduct(operators, PackedWeight(packed, weight.shape[0], weight.shape[1], bias), fusion)

    def make_per_head(self, weight: Tensor) -> Linear:
        """A matrix per head, `weight` [num_heads, num_inputs, num_outputs]: maps [num_rows, num_heads * num_inputs] to
        [num_rows, num_heads * num_outputs]. Not packed: torch's batched product was measured to keep the same rules with AMX, and in 16
        bits is held to them without it, where it was not measured."""
        num_heads, num_inputs, _ = weight.shape

        def product(x: Tensor) -> Tensor:
            heads_first = x.view(x.shape[0], num_heads, num_inputs).transpose(0, 1)
            return torch.bmm(heads_first, weight).transpose(0, 1).reshape(x.shape[0], -1)

        def apply(x: Tensor, other: Tensor | None) -> Tensor:
            return _fused(product(x), other, Fusion.NONE)

        if weight.device.type != "cpu" or weight.dtype is torch.float32:
            return Linear(apply, ())
        return Linear(apply, self._prefill_sizes(product, weight, num_heads * num_inputs))

    def _prefill_sizes(self, apply: Callable[[Tensor], Tensor], weight: Tensor, num_inputs: int) -> tuple[int, ...]:
        key = (weight.shape, weight.dtype)
        if key not in self._probed:
            self._probed[key] = agreeing_sizes(apply, num_inputs, weight.dtype)
        return self._probed[key]


def agreeing_sizes(apply: Callable[[Tensor], Tensor], num_inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Counts of rows, descending and ending with 64, whose calls give each row the very bits that a call of 64 rows gives it."""
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    x = torch.randn(_PREFILL_CANDIDATES[0], num_inputs, generator=generator).to(dtype)
    expected = torch.cat([apply(part) for part in torch.split(x, _PREFILL_ROWS)])
    agreeing = (size for size in _PREFILL_CANDIDATES if torch.equal(apply(x[:size]), expected[:size]))
    return (*agreeing, _PREFILL_ROWS)


def _counts_matter(dtype: torch.dtype) -> bool:
    return dtype is not torch.float32 and torch.cpu._is_amx_tile_supported()


def _fused(product: Tensor, other: Tensor | None, fusion: Fusion) -> Tensor:
    if fusion is Fusion.SILU:
        return F.silu(product)
    if other is None:
        return product
    return product * other if fusion is Fusion.TIMES else product + other


def _linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None = None, fusion: Fusion = Fusion.NONE) -> Tensor:
    out: Tensor
    if other is None:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "swish" if fusion is Fusion.SILU else "none", [], "")
    else:
        out = torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, "mul" if fusion is Fusion.TIMES else "add")
    return out


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's order; None where this torch or this processor cannot."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS_HINT)
        _linear_packed(weight.new_zeros(2, weight.shape[1]), packed, None)
    except (AttributeError, RuntimeError):
        return None
    return packed
