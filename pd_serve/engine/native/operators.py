"""The compiled operators as Python calls on tensors. Used by the engine thread.

Short calls keep the interpreter lock (giving it up and getting it back would cost more than the call), long ones give it up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CDLL, POINTER, PyDLL, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)
LANES = 16
"""A head is whole vectors of so many elements."""
_MAX_GROUP = 4
_SHORT = 65536
"""Elements, or keys times query heads, up to which a call ends within microseconds."""
_SHORT_WEIGHTS = 1 << 20
"""Elements of a weight, as above: it has to be read from memory."""
_WORDS = 64
"""That read() takes at a time."""
_PANEL, _INPUTS = 32, 32
"""Outputs and inputs come in so many."""
_PARALLEL = 32768
"""Elements, or keys times query heads, from which threads gain more than it costs to wake them."""


class Geometry(ctypes.Structure):
    """As in geometry.h; strides in elements."""

    _fields_ = (
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("plane_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("scale", c_float),
    )


class Sequences(ctypes.Structure):
    """As in geometry.h. Holds addresses only: `owned` keeps the memory."""

    _fields_ = (
        ("count", c_int64),
        ("table_stride", c_int64),
        ("tables", c_void_p),
        ("lengths", c_void_p),
        ("scores", c_void_p),
        ("scores_stride", c_int64),
        ("num_threads", c_int64),
    )


class Fusion(Enum):
    """What a product is fused with, before it is rounded."""

    NONE = 0
    SILU = 1
    """silu(product)"""
    TIMES = 2
    """product * other"""
    PLUS = 3
    """product + other"""


class PackedWeight:
    """A weight as oneDNN has packed it, and its bias."""

    def __init__(self, packed: Tensor, num_outputs: int, num_inputs: int, bias: Tensor | None) -> None:
        self.num_outputs = num_outputs
        self.num_inputs = num_inputs
        self.address: int = torch.ops.mkldnn.data_ptr(packed)
        self.bias_address = None if bias is None else bias.data_ptr()
        self.is_short = num_outputs * num_inputs <= _SHORT_WEIGHTS
        self._owned = (packed, bias)


@dataclass(frozen=True, slots=True)
class _Functions:
    norm: Callable[..., None]
    rotate_and_write: Callable[..., None]
    linear: Callable[..., None]
    attend: Callable[..., None]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The decoding sequences of a step, one query each."""

    sequences: Sequences
    is_short: bool
    owned: tuple[Tensor, ...]


class Operators:
    """One library, for one type of elements."""

    PARALLEL_FROM = _PARALLEL

    def __init__(self, library: Path, head_dim: int, dtype: torch.dtype) -> None:
        """Raises OSError where the library cannot be loaded. Precondition: `dtype` is one of DTYPES."""
        self.head_dim = head_dim
        self.dtype = dtype
        self.num_threads = torch.get_num_threads()
        name = str(dtype).removeprefix("torch.")
        short = PyDLL(str(library))
        if not short.pd_prepare():
            raise OSError("the system does not let this process use the processor's tiles (AMX)")
        self._short = _functions(short, name)
        self.library = CDLL(str(library))
        """Whose calls give up the interpreter lock."""
        self._long = _functions(self.library, name)

    def norm(self, x: Tensor, weight: Tensor, floor: float) -> Tensor:
        """RMSNorm of `x` [num_rows, size], contiguous."""
        (num_rows, size), count, out = x.shape, x.numel(), torch.empty_like(x)
        self._of(count).norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, 1, size, size, floor, self._threads(count))
        return out

    def norm_heads_(self, heads: Tensor, weight: Tensor, floor: float) -> None:
        """Normalize `heads` [num_rows, num_heads, head_dim], rows apart, in place; `weight` [num_heads, head_dim]."""
        (num_rows, num_heads, size), count, at = heads.shape, heads.numel(), heads.data_ptr()
        self._of(count).norm(at, weight.data_ptr(), at, num_rows, num_heads, heads.stride(0), size, floor, self._threads(count))

    def rotate_and_write(
        self, geometry: Geometry, heads: Tensor, turns: tuple[Tensor, Tensor], tokens: tuple[Tensor, Tensor], slab: Tensor
    ) -> None:
        """Turn queries and keys of `heads` [num_rows, num_heads + 2 * num_kv_heads, head_dim], contiguous, in place, and write keys and
        values to `slab`. `turns`: cosine and signed sine of all positions; `tokens`: positions and slots [num_rows] int64."""
        self._of(heads.numel()).rotate_and_write(
            geometry,
            heads.data_ptr(),
            turns[0].data_ptr(),
            turns[1].data_ptr(),
            tokens[0].data_ptr(),
            tokens[1].data_ptr(),
            slab.data_ptr(),
            heads.shape[0],
            self._threads(heads.numel()),
        )

    def takes(self, weight: Tensor) -> bool:
        """Whether `weight` [num_outputs, num_inputs], once packed, may be one for linear()."""
        num_outputs, num_inputs = weight.shape
        return weight.dtype is torch.bfloat16 and not num_outputs % _PANEL and not num_inputs % _INPUTS

    def can_read(self, weight: Tensor, packed: Tensor) -> bool:
        """Whether oneDNN has packed `weight` in the order that linear() reads, which is nowhere promised: compares products."""
        if torch.ops.mkldnn._nbytes(packed) != weight.nbytes:
            return False
        num_outputs, num_inputs = weight.shape
        x = torch.randn(2, num_inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
        out = self.linear(PackedWeight(packed, num_outputs, num_inputs, None), x, None, Fusion.NONE)
        expected = x.float() @ weight.float().T
        return torch.allclose(out.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))

    def linear(self, weight: PackedWeight, x: Tensor, other: Tensor | None, fusion: Fusion) -> Tensor:
        """x W^T + bias, [num_rows, num_outputs], fused with `other` of that shape. `x` [num_rows, num_inputs], contiguous."""
        num_rows = x.shape[0]
        out = torch.empty(num_rows, weight.num_outputs, dtype=torch.bfloat16)
        if other is not None and fusion is Fusion.NONE:
            fusion = Fusion.PLUS
        (self._short if weight.is_short else self._long).linear(
            x.data_ptr(),
            weight.address,
            weight.bias_address,
            None if other is None else other.data_ptr(),
            out.data_ptr(),
            num_rows,
            weight.num_inputs,
            weight.num_outputs,
            fusion.value,
            self.num_threads,
        )
        return out

    def plan_decode(self, tables: Tensor, lengths: Tensor, scores: Tensor, work: int) -> DecodePlan:
        """`tables` [num_sequences, longest table] int32, `lengths` [num_sequences] int32: keys that each query sees; `scores`: memory of
        scores_size() elements of float32; `work`: keys times query heads."""
        num_threads = self._threads(work)
        count, table_stride = tables.shape
        sequences = Sequences(
            count=count,
            table_stride=table_stride,
            tables=tables.data_ptr(),
            lengths=lengths.data_ptr(),
            scores=scores.data_ptr(),
            scores_stride=scores.numel() // num_threads,
            num_threads=num_threads,
        )
        return DecodePlan(sequences, work <= _SHORT, (tables, lengths, scores))

    def scores_size(self, longest: int) -> int:
        """Elements that attention over `longest` keys works in."""
        return self.num_threads * _MAX_GROUP * (-(-longest // LANES) * LANES)

    def attend(self, geometry: Geometry, plan: DecodePlan, queries: Tensor, slab: Tensor, out: Tensor, window: int) -> None:
        """Attention of the plan's sequences, whose queries are the first rows of `queries` [.., num_heads, head_dim], heads side by side,
        into the first rows of `out`, contiguous. `window`: keys a query sees at most; 0: all."""
        functions = self._short if plan.is_short else self._long
        functions.attend(geometry, plan.sequences, queries.data_ptr(), queries.stride(0), slab.data_ptr(), out.data_ptr(), window)

    def read(self, words: Tensor) -> int:
        """All bits of `words` or-ed, int32, contiguous, a multiple of 64 of them: reads memory as fast as one thread can."""
        assert not words.numel() % _WORDS, "words come in so many"
        bits: int = self.library.pd_read(c_void_p(words.data_ptr()), c_int64(words.numel()))
        return bits

    def _of(self, num_elements: int) -> _Functions:
        return self._short if num_elements <= _SHORT else self._long

    def _threads(self, num_elements: int) -> int:
        return self.num_threads if num_elements >= _PARALLEL else 1


def geometry_of(slab: Tensor, num_heads: int, scale: float) -> Geometry:
    """`slab` [num_blocks, 2, block_size, num_kv_heads, head_dim], in whatever order; every layer's lies alike."""
    block_stride, plane_stride, token_stride, head_stride, _ = slab.stride()
    return Geometry(num_heads, slab.shape[3], slab.shape[2], block_stride, plane_stride, token_stride, head_stride, scale)


def _functions(library: CDLL | PyDLL, dtype: str) -> _Functions:
    pointer, integer = c_void_p, c_int64
    signatures = {
        "norm": (pointer, pointer, pointer, integer, integer, integer, integer, c_double, integer),
        "rotate_and_write": (POINTER(Geometry), pointer, pointer, pointer, pointer, pointer, pointer, integer, integer),
        "attend": (POINTER(Geometry), POINTER(Sequences), pointer, integer, pointer, pointer, integer),
    }
    functions = {}
    for operator, arguments in signatures.items():
        function = getattr(library, f"pd_{operator}_{dtype}")
        function.argtypes, function.restype = arguments, None
        functions[operator] = function
    linear = library.pd_linear
    linear.argtypes, linear.restype = (pointer,) * 5 + (integer,) * 5, None
    return _Functions(linear=linear, **functions)
