"""All layers of a decode step as one call (decode.cpp). Used by the engine thread, which gives up the interpreter lock meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_serve.engine.native.operators import DecodePlan, Geometry, Operators, PackedWeight, Sequences


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norms' weights are float32, scaled as in models/norm.py."""

    input_norm: Tensor
    qkv: PackedWeight
    head_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim], of queries and keys"""
    output: PackedWeight
    mlp_norm: Tensor
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    window: int
    """Keys a query sees at most; 0: all."""


@dataclass(frozen=True, slots=True)
class DecoderParts:
    layers: tuple[LayerParts, ...]
    hidden_size: int
    norm_floor: float
    head_norm_floor: float
    turns: tuple[Tensor, Tensor]
    """Cosine and signed sine of all positions."""


class NativeDecoder:
    """The layers of one model over one pool."""

    def __init__(self, operators: Operators, parts: DecoderParts, slabs: Sequence[Tensor]) -> None:
        """`slabs`: each layer's. Precondition: the operators' type is bfloat16."""
        assert operators.dtype is torch.bfloat16, "decode.cpp is for bfloat16"
        layers = (_Layer * len(parts.layers))(*(_layer(layer, slab) for layer, slab in zip(parts.layers, slabs, strict=True)))
        self._decoder = _Decoder(
            layers=ctypes.addressof(layers),
            num_layers=len(layers),
            hidden_size=parts.hidden_size,
            head_dim=operators.head_dim,
            norm_floor=parts.norm_floor,
            head_norm_floor=parts.head_norm_floor,
            cosine=parts.turns[0].data_ptr(),
            signed_sine=parts.turns[1].data_ptr(),
            num_threads=operators.num_threads,
            parallel_from=operators.PARALLEL_FROM,
        )
        self._owned = (parts, slabs, layers)
        self._decode = operators.library.pd_decode
        self._decode.argtypes, self._decode.restype = (POINTER(_Decoder), POINTER(Geometry), POINTER(Sequences), POINTER(_Rows)), None
        self._scratch_size = operators.library.pd_decode_scratch
        self._scratch_size.argtypes, self._scratch_size.restype = (POINTER(_Decoder), c_int64), c_int64
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def decode_(self, hidden: Tensor, tokens: tuple[Tensor, Tensor], geometry: Geometry, plan: DecodePlan) -> None:
        """Turn `hidden` [num_rows, hidden_size], contiguous, the embeddings of one row per sequence of `plan`, into what the last layer
        gives; write the rows' keys and values. `tokens`: positions and slots, of num_rows elements at least, int64."""
        num_rows = hidden.shape[0]
        size = self._scratch_size(self._decoder, num_rows)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        rows = _Rows(num_rows, tokens[0].data_ptr(), tokens[1].data_ptr(), hidden.data_ptr(), self._scratch.data_ptr())
        self._decode(self._decoder, geometry, plan.sequences, rows)


class _Weight(Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("num_inputs", c_int64))


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("head_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("slab", c_void_p),
        ("window", c_int64),
        ("qkv", _Weight),
        ("output", _Weight),
        ("gate", _Weight),
        ("up", _Weight),
        ("down", _Weight),
    )


class _Decoder(Structure):
    _fields_ = (
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("head_dim", c_int64),
        ("norm_floor", c_double),
        ("head_norm_floor", c_double),
        ("cosine", c_void_p),
        ("signed_sine", c_void_p),
        ("num_threads", c_int64),
        ("parallel_from", c_int64),
    )


class _Rows(Structure):
    _fields_ = (("count", c_int64), ("positions", c_void_p), ("slots", c_void_p), ("hidden", c_void_p), ("scratch", c_void_p))


def _layer(layer: LayerParts, slab: Tensor) -> _Layer:
    return _Layer(
        layer.input_norm.data_ptr(),
        None if layer.head_norm is None else layer.head_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        slab.data_ptr(),
        layer.window,
        *(_weight(weight) for weight in (layer.qkv, layer.output, layer.gate, layer.up, layer.down)),
    )


def _weight(weight: PackedWeight) -> _Weight:
    return _Weight(weight.address, weight.bias_address, weight.num_outputs, weight.num_inputs)
