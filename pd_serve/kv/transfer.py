"""Which bytes a transfer moves: pure arithmetic over KVLayout. The prefill machine plans with it, the decode machine opens windows.

All ranges are of layer 0. The same ranges of layer l lie `l * layer_nbytes` further on each side, with that side's own layer_nbytes: the
pools may differ in num_blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pd_serve.kv.layout import KVLayout


def plan_ranges(
    layout: KVLayout, src_blocks: Sequence[int], dst_blocks: Sequence[int], start_token: int, end_token: int
) -> NDArray[np.int64]:
    """[n, 3] of (local offset, remote offset, nbytes) that carry tokens [start_token, end_token) from src to dst, in layer 0, coalesced.

    `src_blocks` and `dst_blocks` are block tables from logical block 0, of pools with the same block size, heads and dtype.
    """
    src = _halves(layout, src_blocks, start_token, end_token)
    dst = _halves(layout, dst_blocks, start_token, end_token)
    if not len(src):
        return np.empty((0, 3), dtype=np.int64)
    nbytes = src[:, 1]
    breaks = (src[1:, 0] != src[:-1, 0] + nbytes[:-1]) | (dst[1:, 0] != dst[:-1, 0] + nbytes[:-1])
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return np.stack((src[firsts, 0], dst[firsts, 0], np.add.reduceat(nbytes, firsts)), axis=1)


def write_ranges(layout: KVLayout, blocks: Sequence[int], start_token: int, end_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, ends) of the byte ranges of tokens [start_token, end_token) over all layers: sorted, disjoint, coalesced."""
    halves = _halves(layout, blocks, start_token, end_token)
    if not len(halves):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    halves = halves[np.argsort(halves[:, 0])]
    layers = np.arange(layout.num_layers, dtype=np.int64)[:, None] * layout.layer_nbytes
    starts = (layers + halves[None, :, 0]).ravel()
    ends = (layers + halves[None, :, 0] + halves[None, :, 1]).ravel()
    keep = starts[1:] != ends[:-1]
    return starts[np.concatenate(([True], keep))], ends[np.concatenate((keep, [True]))]


def _halves(layout: KVLayout, blocks: Sequence[int], start_token: int, end_token: int) -> NDArray[np.int64]:
    """[2 * num_blocks, 2] of (offset, nbytes): for each touched block its keys, then its values, in logical order, not coalesced."""
    if start_token < 0 or end_token > len(blocks) * layout.block_size:
        raise ValueError(f"tokens [{start_token}, {end_token}) lie outside {len(blocks)} blocks of {layout.block_size}")
    if start_token >= end_token:
        return np.empty((0, 2), dtype=np.int64)
    size = layout.block_size
    first, last = start_token // size, (end_token - 1) // size
    logical = np.arange(first, last + 1, dtype=np.int64)
    low = np.maximum(start_token - logical * size, 0)
    high = np.minimum(end_token - logical * size, size)
    physical = np.asarray(blocks[first : last + 1], dtype=np.int64)
    keys = physical * layout.block_nbytes + low * layout.token_nbytes
    nbytes = (high - low) * layout.token_nbytes
    offsets = np.stack((keys, keys + layout.half_block_nbytes), axis=1).ravel()
    return np.stack((offsets, np.repeat(nbytes, 2)), axis=1)
