"""Which bytes a transfer moves between equal layouts: pure arithmetic over KVLayout. The prefill machine plans with it, the decode machine
opens windows; between layouts that differ, conversion.py plans.

All ranges are of layer 0. The same ranges of layer l lie `l * layer_nbytes` further on each side, with that side's own layer_nbytes: the
pools may differ in num_blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pd_serve.kv.layout import KVLayout, Segment


def plan_ranges(
    layout: KVLayout, src_blocks: Sequence[int], dst_blocks: Sequence[int], start_token: int, end_token: int
) -> NDArray[np.int64]:
    """[n, 3] of (local offset, remote offset, nbytes) that carry tokens [start_token, end_token) from src to dst, in layer 0, coalesced.

    `src_blocks` and `dst_blocks` are block tables from logical block 0, of pools whose layouts differ in num_blocks at most.
    """
    src = token_ranges(layout, src_blocks, start_token, end_token)
    dst = token_ranges(layout, dst_blocks, start_token, end_token)
    return coalesce(np.stack((src[:, 0], dst[:, 0], src[:, 1]), axis=1))


def write_ranges(
    layout: KVLayout, blocks: Sequence[int], start_token: int, end_token: int, heads: range | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, ends) of the byte ranges of tokens [start_token, end_token) over all layers: sorted, disjoint, coalesced."""
    pieces = token_ranges(layout, blocks, start_token, end_token, heads)
    if not len(pieces):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    pieces = pieces[np.argsort(pieces[:, 0])]
    layers = np.arange(layout.num_layers, dtype=np.int64)[:, None] * layout.layer_nbytes
    starts = (layers + pieces[None, :, 0]).ravel()
    ends = (layers + pieces[None, :, 0] + pieces[None, :, 1]).ravel()
    keep = starts[1:] != ends[:-1]
    return starts[np.concatenate(([True], keep))], ends[np.concatenate((keep, [True]))]


def token_ranges(
    layout: KVLayout, blocks: Sequence[int], start_token: int, end_token: int, heads: range | None = None
) -> NDArray[np.int64]:
    """[n, 2] of (offset, nbytes) in layer 0 of tokens [start_token, end_token), not coalesced: block by block in logical order, within a
    block segment by segment; where only some of a token's heads are meant, token by token within a segment.

    Raises ValueError for tokens beyond the block table.
    """
    if start_token < 0 or end_token > len(blocks) * layout.block_size:
        raise ValueError(f"tokens [{start_token}, {end_token}) lie outside {len(blocks)} blocks of {layout.block_size}")
    if start_token >= end_token:
        return np.empty((0, 2), dtype=np.int64)
    size = layout.block_size
    first, last = start_token // size, (end_token - 1) // size
    logical = np.arange(first, last + 1, dtype=np.int64)
    low = np.maximum(start_token - logical * size, 0)
    high = np.minimum(end_token - logical * size, size)
    bases = np.asarray(blocks[first : last + 1], dtype=np.int64) * layout.block_nbytes
    segments = layout.segments(heads)
    if any(segment.nbytes != segment.stride for segment in segments):
        return _single_tokens(segments, bases, low, high)
    offsets = np.array([segment.offset for segment in segments], dtype=np.int64)
    strides = np.array([segment.stride for segment in segments], dtype=np.int64)
    starts = bases[:, None] + offsets + low[:, None] * strides
    nbytes = (high - low)[:, None] * strides
    return np.stack((starts.ravel(), nbytes.ravel()), axis=1)


def coalesce(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n, 3] of (local offset, remote offset, nbytes), in order: neighbours that continue each other on both sides become one."""
    if not len(ranges):
        return ranges
    nbytes = ranges[:, 2]
    breaks = (ranges[1:, 0] != ranges[:-1, 0] + nbytes[:-1]) | (ranges[1:, 1] != ranges[:-1, 1] + nbytes[:-1])
    firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return np.stack((ranges[firsts, 0], ranges[firsts, 1], np.add.reduceat(nbytes, firsts)), axis=1)


def _single_tokens(
    segments: Sequence[Segment], bases: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64]
) -> NDArray[np.int64]:
    """As token_ranges, where the bytes of successive tokens do not touch."""
    parts: list[NDArray[np.int64]] = []
    for base, first, past in zip(bases, low, high, strict=True):
        tokens = np.arange(first, past, dtype=np.int64)
        for segment in segments:
            starts = base + segment.offset + tokens * segment.stride
            parts.append(np.stack((starts, np.full_like(starts, segment.nbytes)), axis=1))
    return np.concatenate(parts)
