"""Packs KV into staging memory with torch, on the device that the pool is on.

Used by the transport thread only, once the engine has opened the pool; what it reads, the engine thread has written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.kv_pack import pack, source_rows
from pd_serve.kv.conversion import Packing


class TorchPacker:
    """On CUDA a stream of its own, so that packing runs beside compute: NOT YET RUN ON A GPU (docs/gpu.md)."""

    def __init__(self, cache: PagedCache, region: Tensor) -> None:
        """`region` [nbytes] uint8: the registered memory, staging included, on the cache's device."""
        self._cache = cache
        self._region = region
        self._stream: torch.cuda.Stream | None = None
        if region.device.type == "cuda":
            self._stream = torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]
        self._rows: tuple[Packing, Tensor] | None = None
        """Of the packing before: one layer follows the other."""
        self._has_one_thread = False

    def pack(self, layer: int, packing: Packing, at: int) -> None:
        if not self._has_one_thread:
            # A setting of the calling thread. The engine has the cores.
            torch.set_num_threads(1)
            self._has_one_thread = True
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if self._rows is None or self._rows[0] is not packing:
                self._rows = packing, source_rows(self._cache, packing, self._region.device)
            pack(self._cache, layer, packing, self._rows[1], self._region[at : at + packing.nbytes])
        if self._stream is not None:
            self._stream.synchronize()
