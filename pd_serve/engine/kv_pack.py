"""Packing KV for a pool of another layout: gather, convert, order as the target's segments are (kv/conversion.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.fp8 import quantize
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.kv.conversion import Packing
from pd_serve.kv.layout import KVLayout, KVOrder


def source_rows(cache: PagedCache, packing: Packing, device: torch.device) -> Tensor:
    """Where the tokens are, for pack(): the same for all layers."""
    size = packing.src.block_size
    positions = torch.arange(packing.start_token, packing.end_token)
    first = packing.start_token // size
    table = torch.tensor(packing.src_blocks[first : (packing.end_token - 1) // size + 1])
    return cache.rows((table[positions // size - first] * size + positions % size).to(device))


def pack(cache: PagedCache, layer: int, packing: Packing, rows: Tensor, out: Tensor) -> None:
    """Write the packed bytes of one layer to `out` [packing.nbytes] uint8 on the cache's device."""
    heads = packing.heads.src
    encode(cache.read(layer, rows)[:, :, heads.start : heads.stop], packing.dst, out)


def encode(values: Tensor, layout: KVLayout, out: Tensor) -> None:
    """`values` [num_planes, num_tokens, num_heads, head_dim] as `layout` stores them, segment by segment, into `out` uint8."""
    if layout.order is KVOrder.HEAD_MAJOR:
        values = values.transpose(1, 2)
    if not layout.dtype.has_scales:
        dtype = torch_dtype(layout.dtype.value)
        out.view(dtype).view(values.shape).copy_(values)
        return
    elements, scales = quantize(values)
    planes = out.view(values.shape[0], -1)
    num_elements = elements[0].numel()
    planes[:, :num_elements].copy_(elements.view(torch.uint8).reshape(values.shape[0], -1))
    planes[:, num_elements:].copy_(scales.reshape(values.shape[0], -1))
