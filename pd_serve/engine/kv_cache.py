"""The KV pool as tensors: one slab per layer over the region that the transport (or nobody) registered. Owned by the engine thread."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_serve.engine.dtypes import torch_dtype
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVLayout


class KVCache:
    """Geometry as in kv/layout.py. Does not own `buffer`, which must outlive it; without one it allocates zeroed memory of its own."""

    def __init__(self, layout: KVLayout, buffer: memoryview | None, device: torch.device) -> None:
        """Raises ConfigError where the buffer is too small or read-only, or is host memory for a pool on another device."""
        self.layout = layout
        dtype = torch_dtype(layout.dtype.value)
        if buffer is None:
            pool = torch.zeros(layout.pool_nbytes // layout.dtype.nbytes, dtype=dtype, device=device)
        else:
            if device.type != "cpu":
                raise ConfigError(f"a host buffer cannot hold a KV pool on {device}")
            if buffer.readonly or buffer.nbytes < layout.pool_nbytes:
                raise ConfigError(f"KV pool needs {layout.pool_nbytes} writable bytes, the region has {buffer.nbytes}")
            pool = torch.frombuffer(buffer, dtype=dtype, count=layout.pool_nbytes // layout.dtype.nbytes)
        self._pool = pool
        shape = (layout.num_layers, layout.num_blocks, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._layers = tuple(pool.view(shape).unbind(0))
        self._rows = tuple(slab.view(-1, layout.num_kv_heads, layout.head_dim) for slab in self._layers)

    @property
    def address(self) -> int:
        """Of the first byte; for registering memory that the cache allocated itself."""
        return self._pool.data_ptr()

    def layer(self, index: int) -> Tensor:
        """[num_blocks, 2, block_size, num_kv_heads, head_dim], a view: keys at 0, values at 1."""
        return self._layers[index]

    def write(self, index: int, kv_rows: Tensor, kv_heads: Tensor) -> None:
        """Store a layer's `kv_heads` [num_tokens, 2 * num_kv_heads, head_dim], keys first, at `kv_rows` (StepInputs.kv_rows)."""
        self._rows[index].index_copy_(0, kv_rows, kv_heads.reshape(-1, self.layout.num_kv_heads, self.layout.head_dim))
