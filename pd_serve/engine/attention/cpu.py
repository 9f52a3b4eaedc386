"""Paged attention on CPU: gather a sequence's blocks into a reused buffer, then torch's fused attention over contiguous keys.

Shapes that make the result a function of the sequence alone (base.py, rules 1 to 3; measured in bf16 and fp32):
  decode   one query per sequence, its heads grouped by KV head as rows ([KV heads, group, head_dim]: no repeated keys, no causal mask);
           keys padded to the next multiple of 64 and masked. Sequences of equal padded length share one call.
  prefill  tiles of 64 queries at absolute positions 0, 64, 128, …; a chunk that begins or ends inside a tile is padded with zero queries;
           keys cut at the tile's end.
Keys beyond the sequence are zeroed after the gather: a mask alone would let a stale infinity through (0 * inf).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import AttentionGeometry, QuerySpan
from pd_serve.engine.attention.gather import Gather, GatherBuffer
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer

TILE = 64
"""Queries per prefill tile, and the step in which keys are padded."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode sequences of equal padded length: consecutive rows of the step, first_row .. past_row - 1."""

    first_row: int
    past_row: int
    keys: Tensor
    """[num_sequences, num_kv_heads, padded_len, head_dim], a view of what the gather fills"""
    values: Tensor
    mask: Tensor
    """[num_sequences, 1, 1, padded_len], 0 or -inf"""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries at positions `start` .. `start` + TILE - 1 of one sequence, as far as they lie in the chunk."""

    padded_rows: slice
    """Its queries among the chunk's, which begin at a tile's edge."""
    keys: Tensor
    """[1, num_kv_heads, start + TILE, head_dim], a view of what the gather fills"""
    values: Tensor
    mask: Tensor
    """[TILE, start + TILE], 0 or -inf"""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One prefill chunk: rows first_row .. past_row - 1, `offset` queries behind the edge of its first tile."""

    gather: Gather
    first_row: int
    past_row: int
    offset: int
    padded_len: int
    """Queries of all its tiles."""
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Valid until the next plan is made: its views are of the one gather buffer."""

    num_tokens: int
    decode_gather: Gather | None
    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class CpuAttention:
    """Owns a gather buffer and the causal mask; used by one thread."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype) -> None:
        self._geometry = geometry
        self._has_groups = geometry.num_heads != geometry.num_kv_heads
        self._dtype = dtype
        self._buffer = GatherBuffer(geometry, dtype)
        self._reach = _round_up(geometry.max_len, TILE)
        # Row r of a tile at position a sees keys up to a + r. One wide band, of which every tile takes the part that ends `a` to its right.
        band = torch.arange(self._reach + TILE)[None] <= torch.arange(TILE)[:, None] + self._reach
        self._causal_band = torch.zeros(band.shape, dtype=dtype).masked_fill_(~band, float("-inf"))

    def plan(self, spans: Sequence[QuerySpan]) -> CpuPlan:
        decode = [span for span in spans if span.phase is Phase.DECODE]
        prefill = [span for span in spans if span.phase is Phase.PREFILL]
        padded_lens = [_round_up(span.context_len, TILE) for span in decode]
        decode_blocks = sum(self._buffer.num_blocks_for(padded_len) for padded_len in padded_lens)
        chunk_blocks = [self._buffer.num_blocks_for(_round_up(span.context_len, TILE)) for span in prefill]
        self._buffer.reserve(max([decode_blocks, *chunk_blocks]))
        return CpuPlan(
            num_tokens=sum(span.num_queries for span in spans),
            decode_gather=self._buffer.gather(decode, padded_lens) if decode else None,
            groups=tuple(self._decode_groups(decode, padded_lens)),
            chunks=tuple(self._chunk(span) for span in prefill),
        )

    def attend(self, queries: Tensor, layer: KVLayer, plan: CpuPlan) -> Tensor:
        if not plan.chunks and len(plan.groups) == 1 and plan.decode_gather is not None:
            plan.decode_gather.run(layer)
            return self._attend_group(queries, plan.groups[0]).reshape(plan.num_tokens, -1)
        out = torch.empty(plan.num_tokens, self._geometry.num_heads, self._geometry.head_dim, dtype=self._dtype)
        if plan.decode_gather is not None:
            plan.decode_gather.run(layer)
            for group in plan.groups:
                rows = slice(group.first_row, group.past_row)
                out[rows] = self._attend_group(queries[rows], group).reshape(-1, *out.shape[1:])
        for chunk in plan.chunks:
            chunk.gather.run(layer)
            out[chunk.first_row : chunk.past_row] = self._attend_chunk(queries[chunk.first_row : chunk.past_row], chunk)
        return out.view(plan.num_tokens, -1)

    def _attend_group(self, queries: Tensor, group: _DecodeGroup) -> Tensor:
        """[num_sequences, num_heads, head_dim] to [num_sequences, num_kv_heads, group_size, head_dim]."""
        geometry = self._geometry
        grouped = queries.view(queries.shape[0], geometry.num_kv_heads, -1, geometry.head_dim)
        return F.scaled_dot_product_attention(grouped, group.keys, group.values, attn_mask=group.mask, scale=geometry.scale)

    def _attend_chunk(self, queries: Tensor, chunk: _Chunk) -> Tensor:
        """[num_queries, num_heads, head_dim] to the same shape."""
        num_queries = queries.shape[0]
        if num_queries != chunk.padded_len:
            padded = queries.new_zeros(chunk.padded_len, *queries.shape[1:])
            padded[chunk.offset : chunk.offset + num_queries] = queries
            queries = padded
        heads_first = queries.transpose(0, 1)[None]
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for tile in chunk.tiles:
            out[tile.padded_rows] = F.scaled_dot_product_attention(
                heads_first[:, :, tile.padded_rows],
                tile.keys,
                tile.values,
                attn_mask=tile.mask,
                scale=self._geometry.scale,
                enable_gqa=self._has_groups,
            )[0].transpose(0, 1)
        return out[chunk.offset : chunk.offset + num_queries]

    def _decode_groups(self, spans: Sequence[QuerySpan], padded_lens: Sequence[int]) -> Iterator[_DecodeGroup]:
        first_block, num_blocks = 0, sum(self._buffer.num_blocks_for(padded_len) for padded_len in padded_lens)
        for padded_len, members in groupby(zip(spans, padded_lens, strict=True), key=lambda member: member[1]):
            sequences = [span for span, _ in members]
            keys, values = self._buffer.views(first_block, len(sequences), padded_len, num_blocks)
            lengths = np.array([span.context_len for span in sequences])
            hidden = torch.from_numpy(np.arange(padded_len) >= lengths[:, None])
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
            first_row = sequences[0].first_row
            yield _DecodeGroup(first_row, first_row + len(sequences), keys, values, mask[:, None, None])
            first_block += len(sequences) * self._buffer.num_blocks_for(padded_len)

    def _chunk(self, span: QuerySpan) -> _Chunk:
        first, past = span.start // TILE * TILE, _round_up(span.context_len, TILE)
        keys, values = self._buffer.views(0, 1, past, self._buffer.num_blocks_for(past))
        tiles = tuple(
            _Tile(
                padded_rows=slice(start - first, start - first + TILE),
                keys=keys[:, :, : start + TILE],
                values=values[:, :, : start + TILE],
                mask=self._causal_band[:, self._reach - start : self._reach + TILE],
            )
            for start in range(first, past, TILE)
        )
        rows = (span.first_row, span.first_row + span.num_queries)
        return _Chunk(self._buffer.gather([span], [past]), *rows, span.start - first, past - first, tiles)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
