"""Linear layers whose result for a row does not depend on how many other rows are computed with it.

On CPU the weight is repacked once into oneDNN's blocked order, 2 to 3.5 times faster than the plain one (measured on one thread). Those
operators are private to torch: where they are missing or refuse a type, and on CUDA, torch's public linear is used. That one is not
invariant: the promise of bit-identical logits is for packed layers, the promise of identical float32 tokens for all.

What oneDNN's kernels do, and the rule that follows (all measured):
  one row alone    is a matrix-vector product that sums in another order: it is padded to two.
  AMX, 16 bits     32 rows or fewer sum in one order, more in another, and for wide inputs the count of rows matters again. So decode rows
                   go through calls of at most 32, prefill rows through calls of 64 rows and of such multiples as a probe at load time
                   found to agree with 64. As in attention: a row's kernel depends on its phase, not on its company.
  everything else  two or more rows: one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_ROWS_HINT = 16
"""Batch size that oneDNN packs for; one packed copy serves every batch size."""
DECODE_ROWS = 32
_PREFILL_ROWS = 64
ROW_STEP = 16
"""More rows than decode's are padded to a multiple. oneDNN compiles and keeps a kernel of half a megabyte per weight and count of rows, and
replaces them when it has 1,024: over all counts up to 512 the process grew by 2 GiB and did not stop (measured, float32)."""
_PREFILL_CANDIDATES = (512, 256, 128)
_PROBE_SEED = 0


class Linear:
    """y = x W^T + b. Made by LinearFactory."""

    def __init__(self, apply: Callable[[Tensor], Tensor], prefill_sizes: tuple[int, ...]) -> None:
        """`apply` maps [num_rows >= 2, num_inputs]; `prefill_sizes`: counts of rows that prefill may use, descending, empty: any."""
        self._apply = apply
        self._prefill_sizes = prefill_sizes

    def __call__(self, x: Tensor, num_decode_rows: int) -> Tensor:
        """[num_rows, num_inputs] to [num_rows, num_outputs]; the first `num_decode_rows` are decode's, the others prefill's."""
        num_rows = x.shape[0]
        is_one_call = not self._prefill_sizes or (num_rows == num_decode_rows and num_rows <= DECODE_ROWS)
        if is_one_call:
            return self._apply(x) if num_rows > 1 else self._apply(x.expand(2, -1).contiguous())[:1]
        return torch.cat([*self._decode_parts(x[:num_decode_rows]), *self._prefill_parts(x[num_decode_rows:])])

    def _decode_parts(self, x: Tensor) -> Iterator[Tensor]:
        for part in torch.split(x, DECODE_ROWS) if x.shape[0] else ():
            yield self._apply(part) if part.shape[0] > 1 else self._apply(part.expand(2, -1).contiguous())[:1]

    def _prefill_parts(self, x: Tensor) -> Iterator[Tensor]:
        first, num_rows = 0, x.shape[0]
        while first < num_rows:
            size = next((size for size in self._prefill_sizes if size <= num_rows - first), self._prefill_sizes[-1])
            part = x[first : first + size]
            missing = size - part.shape[0]
            yield self._apply(F.pad(part, (0, 0, 0, missing)))[:-missing] if missing else self._apply(part)
            first += size


class LinearFactory:
    """Packs weights; probes each shape once."""

    def __init__(self) -> None:
        self._probed: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """`weight` [num_outputs, num_inputs], `bias` [num_outputs]. On CPU only the packed copy is kept: opaque, no slicing, no saving."""
        packed = _pack(weight) if weight.device.type == "cpu" else None
        if packed is None:
            return Linear(lambda x: F.linear(x, weight, bias), ())

        def apply(x: Tensor) -> Tensor:
            missing = -x.shape[0] % ROW_STEP if x.shape[0] > DECODE_ROWS else 0
            return _linear_packed(F.pad(x, (0, 0, 0, missing)), packed, bias)[:-missing] if missing else _linear_packed(x, packed, bias)

        return Linear(apply, self._prefill_sizes(apply, weight, weight.shape[1]) if _counts_matter(weight.dtype) else ())

    def make_per_head(self, weight: Tensor) -> Linear:
        """A matrix per head, `weight` [num_heads, num_inputs, num_outputs]: maps [num_rows, num_heads * num_inputs] to
        [num_rows, num_heads * num_outputs]. Not packed: torch's batched product was measured to keep the same rules with AMX, and in 16
        bits is held to them without it, where it was not measured."""
        num_heads, num_inputs, _ = weight.shape

        def apply(x: Tensor) -> Tensor:
            heads_first = x.view(x.shape[0], num_heads, num_inputs).transpose(0, 1)
            return torch.bmm(heads_first, weight).transpose(0, 1).reshape(x.shape[0], -1)

        if weight.device.type != "cpu" or weight.dtype is torch.float32:
            return Linear(apply, ())
        return Linear(apply, self._prefill_sizes(apply, weight, num_heads * num_inputs))

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
