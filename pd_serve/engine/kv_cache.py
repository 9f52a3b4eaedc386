"""The KV pool as tensors: one slab per layer over the region that the transport (or nobody) registered. Owned by the engine thread.

    open_kv_cache -> KVCache            elements of the engine's own type, either order
                     ScaledKVCache      fp8 with scales (kv_cache_fp8.py)

Both give the engine the same three things: where a step's tokens go (once per step), writing them (once per layer), and gathering planes of
blocks for attention, always as [block_size, num_kv_heads, head_dim] in the engine's type, whatever lies in the pool.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pd_serve.engine.dtypes import torch_dtype
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVLayout, KVOrder


class KVLayer(Protocol):
    """One layer's slab, as attention reads it."""

    def gather(self, planes: Tensor, target: Tensor) -> None:
        """Copy `planes` [n] (block * num_planes + plane) to `target` [n, block_size * num_kv_heads * head_dim], token-major."""
        ...

    @property
    def slab(self) -> Tensor:
        """[num_blocks, num_planes, block_size, num_kv_heads, head_dim], a view, for kernels that read pages. Raises ConfigError where the
        elements are not of the engine's type."""
        ...


class PagedCache(Protocol):
    layout: KVLayout
    region: Tensor
    """[at least pool_nbytes] uint8: the pool, and whatever was asked for behind it."""

    @property
    def address(self) -> int:
        """Of the first byte; for registering memory that the cache allocated itself."""
        ...

    def rows(self, slots: Tensor) -> Tensor:
        """Where tokens at `slots` [num_tokens] (block * block_size + offset) are, for write() and read(): the same for all layers."""
        ...

    def write(self, index: int, rows: Tensor, heads: Tensor) -> None:
        """Store a layer's `heads` [num_tokens, num_planes * num_kv_heads, head_dim], keys first, in the engine's type."""
        ...

    def layer(self, index: int) -> KVLayer: ...

    def read(self, index: int, rows: Tensor) -> Tensor:
        """[num_planes, num_tokens, num_kv_heads, head_dim]: a copy of what is stored there; of scaled elements, float32."""
        ...


def open_kv_cache(
    layout: KVLayout, buffer: memoryview | None, device: torch.device, dtype: torch.dtype, extra_nbytes: int = 0
) -> PagedCache:
    """Does not own `buffer`, which must outlive it; without one the cache allocates zeroed memory of its own, `extra_nbytes` more than the
    pool takes.

    `dtype`: the engine's. Raises ConfigError where the buffer is too small or read-only, is host memory for a pool on another device, or
    the layout's elements are neither of the engine's type nor scaled.
    """
    if layout.dtype.has_scales:
        from pd_serve.engine.kv_cache_fp8 import ScaledKVCache

        return ScaledKVCache(layout, region_of(layout, buffer, device, extra_nbytes), dtype)
    if torch_dtype(layout.dtype.value) != dtype:
        raise ConfigError(f"a KV pool of {layout.dtype.value} needs an engine of the same type, or fp8 elements")
    return KVCache(layout, region_of(layout, buffer, device, extra_nbytes))


def region_of(layout: KVLayout, buffer: memoryview | None, device: torch.device, extra_nbytes: int = 0) -> Tensor:
    """[at least pool_nbytes] uint8. Raises ConfigError, as above."""
    if buffer is None:
        return torch.zeros(layout.pool_nbytes + extra_nbytes, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        raise ConfigError(f"a host buffer cannot hold a KV pool on {device}")
    if buffer.readonly or buffer.nbytes < layout.pool_nbytes:
        raise ConfigError(f"KV pool needs {layout.pool_nbytes} writable bytes, the region has {buffer.nbytes}")
    return torch.frombuffer(buffer, dtype=torch.uint8)


def row_pattern(layout: KVLayout, slots: Tensor) -> Tensor:
    """[num_tokens, num_planes, heads] rows of a slab seen as rows of one head (head-major) or of one token (token-major, heads = 1)."""
    size, planes = layout.block_size, torch.arange(layout.num_planes, device=slots.device)
    blocks, offsets = slots // size, slots % size
    plane_index = blocks[:, None] * layout.num_planes + planes
    if layout.order is KVOrder.TOKEN_MAJOR:
        return (plane_index * size + offsets[:, None])[..., None]
    heads = torch.arange(layout.num_kv_heads, device=slots.device)
    return (plane_index[..., None] * layout.num_kv_heads + heads) * size + offsets[:, None, None]


class KVCache:
    """Geometry as in kv/layout.py, elements of the engine's type."""

    def __init__(self, layout: KVLayout, region: Tensor) -> None:
        """`region` as in PagedCache."""
        self.layout = layout
        self.region = region
        self._pool = region[: layout.pool_nbytes].view(torch_dtype(layout.dtype.value))
        slabs = self._pool.view(layout.num_layers, layout.num_blocks * layout.num_planes, -1).unbind(0)
        self._layers = tuple(PlainLayer(layout, slab) for slab in slabs)
        width = layout.head_dim * (layout.num_kv_heads if layout.order is KVOrder.TOKEN_MAJOR else 1)
        self._rows = tuple(slab.view(-1, width) for slab in slabs)
        self._width = width

    @property
    def address(self) -> int:
        return self._pool.data_ptr()

    def rows(self, slots: Tensor) -> Tensor:
        return row_pattern(self.layout, slots).flatten()

    def write(self, index: int, rows: Tensor, heads: Tensor) -> None:
        self._rows[index].index_copy_(0, rows, heads.reshape(-1, self._width))

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

    def read(self, index: int, rows: Tensor) -> Tensor:
        layout = self.layout
        read = self._rows[index].index_select(0, rows)
        return read.view(-1, layout.num_planes, layout.num_kv_heads, layout.head_dim).transpose(0, 1)


class PlainLayer:
    """A slab whose elements are of the engine's type."""

    def __init__(self, layout: KVLayout, planes: Tensor) -> None:
        """`planes` [num_blocks * num_planes, block_size * num_kv_heads * head_dim], in the layout's order."""
        self._layout = layout
        self._planes = planes
        shape = (layout.num_blocks, layout.num_planes, layout.block_size, layout.num_kv_heads, layout.head_dim)
        if layout.order is KVOrder.TOKEN_MAJOR:
            self.slab = planes.view(shape)
        else:
            self.slab = planes.view(*shape[:2], layout.num_kv_heads, layout.block_size, layout.head_dim).transpose(2, 3)

    def gather(self, planes: Tensor, target: Tensor) -> None:
        layout = self._layout
        if layout.order is KVOrder.TOKEN_MAJOR:
            torch.index_select(self._planes, 0, planes, out=target)
            return
        gathered = self._planes.index_select(0, planes).view(-1, layout.num_kv_heads, layout.block_size, layout.head_dim)
        target.view(-1, layout.block_size, layout.num_kv_heads, layout.head_dim).copy_(gathered.transpose(1, 2))
