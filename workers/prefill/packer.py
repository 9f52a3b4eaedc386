"""Packs KV into staging memory with torch, on the device that the pool is on.

Used by the transport thread only, once the engine has opened the pool; what it reads, the engine thread has written.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.kv_pack import pack, source_rows
from pd_serve.kv.conversion import Packing

_MAX_ROWS = 128
"""Packings whose rows are remembered: those of a step come again with every layer."""


class TorchPacker:
    """On CUDA a stream of its own, so that packing runs beside compute: NOT YET RUN ON A GPU (docs/gpu.md)."""

    def __init__(self, cache: PagedCache, region: Tensor) -> None:
        """`region` [nbytes] uint8: the registered memory, staging included, on the cache's device."""
        self._cache = cache
        self._region = region
        self._stream: torch.cuda.Stream | None = None
        if region.device.type == "cuda":
            self._stream = torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]
        self._rows: OrderedDict[int, tuple[Packing, Tensor]] = OrderedDict()
        """By id of the packing, which is kept with them so that the id stays its own."""
        self._has_one_thread = False

    def pack(self, layer: int, packing: Packing, at: int) -> None:
        if not self._has_one_thread:
            # A setting of the calling thread. The engine has the cores.
            torch.set_num_threads(1)
            self._has_one_thread = True
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            pack(self._cache, layer, packing, self._rows_of(packing), self._region[at : at + packing.nbytes])
        if self._stream is not None:
            self._stream.synchronize()

    def _rows_of(self, packing: Packing) -> Tensor:
        key = id(packing)
        if key not in self._rows:
            self._rows[key] = packing, source_rows(self._cache, packing, self._region.device)
            if len(self._rows) > _MAX_ROWS:
                self._rows.popitem(last=False)
        self._rows.move_to_end(key)
        return self._rows[key][1]
