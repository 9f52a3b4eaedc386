"""A KV pool of 8-bit floats: half the memory of bf16, a byte more per token and head for the scale. Owned by the engine thread.

Every plane is its elements followed by their scales (kv/layout.py), so a block still goes out as one range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pd_serve.engine.fp8 import dequantize_into, quantize
from pd_serve.engine.kv_cache import KVLayer
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVLayout, KVOrder


class ScaledKVCache:
    """See PagedCache. Attention gets elements already multiplied by their scales, in the engine's type."""

    def __init__(self, layout: KVLayout, region: Tensor, dtype: torch.dtype) -> None:
        """`region` as in PagedCache; `dtype`: the engine's."""
        self.layout = layout
        self.region = region
        self._dtype = dtype
        num_planes = layout.num_blocks * layout.num_planes
        self._planes = region[: layout.pool_nbytes].view(layout.num_layers, num_planes, layout.plane_nbytes)
        num_elements = layout.block_size * layout.num_kv_heads * layout.head_dim
        shape = (layout.num_layers, num_planes, layout.block_size, layout.num_kv_heads)
        if layout.order is KVOrder.HEAD_MAJOR:
            shape = (layout.num_layers, num_planes, layout.num_kv_heads, layout.block_size)
        self._elements = self._planes[..., :num_elements].view(*shape, layout.head_dim)
        self._scales = self._planes[..., num_elements:].view(shape)

    @property
    def address(self) -> int:
        return self.region.data_ptr()

    def rows(self, slots: Tensor) -> Tensor:
        """[3, num_tokens * num_planes * num_kv_heads]: plane, first and second index in it."""
        layout = self.layout
        size, planes = layout.block_size, torch.arange(layout.num_planes, device=slots.device)
        heads = torch.arange(layout.num_kv_heads, device=slots.device)
        plane = ((slots // size)[:, None] * layout.num_planes + planes)[..., None]
        offset = (slots % size)[:, None, None]
        order = (plane, offset, heads) if layout.order is KVOrder.TOKEN_MAJOR else (plane, heads, offset)
        return torch.stack([index.expand(len(slots), layout.num_planes, layout.num_kv_heads).flatten() for index in order])

    def write(self, index: int, rows: Tensor, heads: Tensor) -> None:
        elements, scales = quantize(heads.reshape(-1, self.layout.head_dim))
        where = tuple(rows)
        self._elements[index][where] = elements.view(torch.uint8)
        self._scales[index][where] = scales

    def layer(self, index: int) -> KVLayer:
        return _ScaledLayer(self.layout, self._planes[index], self._dtype)

    def read(self, index: int, rows: Tensor) -> Tensor:
        layout = self.layout
        where = tuple(rows)
        elements = self._elements[index][where].view(torch.float8_e4m3fn)
        values = torch.empty(elements.shape, dtype=torch.float32, device=elements.device)
        dequantize_into(elements, self._scales[index][where], values)
        return values.view(-1, layout.num_planes, layout.num_kv_heads, layout.head_dim).transpose(0, 1)


class _ScaledLayer:
    def __init__(self, layout: KVLayout, planes: Tensor, dtype: torch.dtype) -> None:
        """`planes` [num_blocks * num_planes, plane_nbytes] uint8."""
        self._layout = layout
        self._planes = planes
        self._dtype = dtype

    def gather(self, planes: Tensor, target: Tensor) -> None:
        layout = self._layout
        size, num_heads = layout.block_size, layout.num_kv_heads
        num_elements = size * num_heads * layout.head_dim
        gathered = self._planes.index_select(0, planes)
        elements = gathered[:, :num_elements].view(torch.float8_e4m3fn)
        scales = gathered[:, num_elements:]
        shaped = target.view(-1, size, num_heads, layout.head_dim)
        if layout.order is KVOrder.HEAD_MAJOR:
            shaped = shaped.transpose(1, 2)
        dequantize_into(elements.view(shaped.shape), scales.view(shaped.shape[:3]), shaped)

    @property
    def slab(self) -> Tensor:
        raise ConfigError("this attention reads the KV pool in place; fp8 KV needs one that gathers (engine.device = cpu)")
