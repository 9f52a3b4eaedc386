"""Paged attention on CPU: gather a sequence's blocks into a reused buffer, then torch's fused attention over contiguous keys.

Shapes that make the result a function of the sequence alone (base.py, rules 1 to 3; measured in bf16 and fp32):
  decode   one query per sequence, its heads grouped by KV head as rows ([KV heads, group, head_dim]: no repeated keys, no causal mask);
           keys padded to the next multiple of 64 and masked. Sequences of equal padded length share one call.
  prefill  tiles of 64 queries at absolute positions 0, 64, 128, …; a chunk that begins or ends inside a tile is padded with zero queries;
           keys cut at the tile's end.
Keys beyond the sequence are zeroed after the gather: a mask alone would let a stale infinity through (0 * inf).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pd_serve.engine.attention.base import AttentionGeometry, QuerySpan
from pd_serve.engine.batch import Phase

TILE = 64
"""Queries per prefill tile, and the step in which keys are padded."""


@dataclass(frozen=True, slots=True)
class _Gather:
    """Blocks to copy side by side: first the keys of all, then the values of all."""

    half_blocks: Tensor
    """Index of each half block in the slab seen as [num_blocks * 2, …]."""
    num_tokens: int
    """Gathered keys; as many values follow."""
    blank_rows: Tensor
    """Gathered rows (keys and values) that lie beyond their sequence."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode sequences of equal padded length: consecutive rows of the step."""

    first_row: int
    num_sequences: int
    first_key: int
    """Row of the group's first gathered key."""
    gathered_len: int
    """Gathered keys per sequence (whole blocks)."""
    padded_len: int
    """Of them those that are looked at, a multiple of TILE."""
    mask: Tensor
    """[num_sequences, 1, 1, padded_len], 0 or -inf."""


@dataclass(frozen=True, slots=True)
class _Decode:
    gather: _Gather
    groups: tuple[_DecodeGroup, ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One prefill chunk: queries at positions start .. end - 1, in rows from first_row."""

    gather: _Gather
    first_row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CpuPlan:
    num_tokens: int
    decode: _Decode | None
    chunks: tuple[_Chunk, ...]


class CpuAttention:
    """Single-threaded owner of a gather buffer and of the causal mask."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype) -> None:
        self._geometry = geometry
        self._group_size = geometry.num_heads // geometry.num_kv_heads
        self._row_width = geometry.num_kv_heads * geometry.head_dim
        self._dtype = dtype
        self._buffer = torch.empty(0, dtype=dtype)
        self._reach = _round_up(geometry.max_len, TILE)
        # Row r of a tile at position a sees keys up to a + r. One wide band, of which every tile takes the part that ends `a` to its right.
        band = torch.arange(self._reach + TILE)[None] <= torch.arange(TILE)[:, None] + self._reach
        self._causal_band = torch.zeros(band.shape, dtype=dtype).masked_fill_(~band, float("-inf"))

    def plan(self, spans: Sequence[QuerySpan]) -> CpuPlan:
        decode = [span for span in spans if span.phase is Phase.DECODE]
        return CpuPlan(
            num_tokens=sum(span.num_queries for span in spans),
            decode=self._plan_decode(decode) if decode else None,
            chunks=tuple(self._plan_chunk(span) for span in spans if span.phase is Phase.PREFILL),
        )

    def attend(self, queries: Tensor, slab: Tensor, plan: CpuPlan) -> Tensor:
        half_blocks = slab.view(-1, self._geometry.block_size * self._row_width)
        if plan.decode is not None and not plan.chunks and len(plan.decode.groups) == 1:
            keys, values = self._gather(half_blocks, plan.decode.gather)
            return self._attend_group(queries, keys, values, plan.decode.groups[0]).view(plan.num_tokens, -1)
        out = torch.empty(plan.num_tokens, self._geometry.num_heads, self._geometry.head_dim, dtype=self._dtype)
        if plan.decode is not None:
            keys, values = self._gather(half_blocks, plan.decode.gather)
            for group in plan.decode.groups:
                rows = slice(group.first_row, group.first_row + group.num_sequences)
                out[rows] = self._attend_group(queries[rows], keys, values, group).view(group.num_sequences, *out.shape[1:])
        for chunk in plan.chunks:
            keys, values = self._gather(half_blocks, chunk.gather)
            self._attend_chunk(queries, keys, values, chunk, out)
        return out.view(plan.num_tokens, -1)

    def _attend_group(self, queries: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup) -> Tensor:
        """[num_sequences, num_heads, head_dim] to [num_sequences, num_kv_heads, group_size, head_dim]."""
        geometry = self._geometry
        shape = (group.num_sequences, group.gathered_len, geometry.num_kv_heads, geometry.head_dim)
        rows = slice(group.first_key, group.first_key + group.num_sequences * group.gathered_len)
        return F.scaled_dot_product_attention(
            queries.view(group.num_sequences, geometry.num_kv_heads, self._group_size, geometry.head_dim),
            keys[rows].view(shape)[:, : group.padded_len].transpose(1, 2),
            values[rows].view(shape)[:, : group.padded_len].transpose(1, 2),
            attn_mask=group.mask,
            scale=geometry.scale,
        )

    def _attend_chunk(self, queries: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk, out: Tensor) -> None:
        geometry = self._geometry
        first_tile, past_tile = chunk.start // TILE * TILE, _round_up(chunk.end, TILE)
        offset = chunk.start - first_tile
        rows = slice(chunk.first_row, chunk.first_row + chunk.end - chunk.start)
        tiled = queries[rows]
        if offset or chunk.end != past_tile:
            tiled = queries.new_zeros(past_tile - first_tile, geometry.num_heads, geometry.head_dim)
            tiled[offset : offset + chunk.end - chunk.start] = queries[rows]
        heads_first = tiled.transpose(0, 1)[None]
        keys = keys.view(-1, geometry.num_kv_heads, geometry.head_dim).transpose(0, 1)[None]
        values = values.view(-1, geometry.num_kv_heads, geometry.head_dim).transpose(0, 1)[None]
        for position in range(first_tile, past_tile, TILE):
            tile_end = position + TILE
            attended = F.scaled_dot_product_attention(
                heads_first[:, :, position - first_tile : tile_end - first_tile],
                keys[:, :, :tile_end],
                values[:, :, :tile_end],
                attn_mask=self._causal_band[:, self._reach - position : self._reach + TILE],
                scale=geometry.scale,
                enable_gqa=self._group_size > 1,
            )
            low, high = max(position, chunk.start), min(tile_end, chunk.end)
            first = chunk.first_row + low - chunk.start
            out[first : first + high - low] = attended[0].transpose(0, 1)[low - position : high - position]

    def _gather(self, half_blocks: Tensor, gather: _Gather) -> tuple[Tensor, Tensor]:
        """Keys and values, each [gather.num_tokens, num_kv_heads * head_dim], valid until the next gather."""
        needed = 2 * gather.num_tokens * self._row_width
        if self._buffer.numel() < needed:
            # Fresh pages cost more than the copy: grow rarely, reuse always.
            self._buffer = torch.empty(max(needed, 2 * self._buffer.numel()), dtype=self._dtype)
        blocks = self._buffer[:needed].view(-1, half_blocks.shape[1])
        torch.index_select(half_blocks, 0, gather.half_blocks, out=blocks)
        rows = blocks.view(-1, self._row_width)
        rows.index_fill_(0, gather.blank_rows, 0.0)
        return rows[: gather.num_tokens], rows[gather.num_tokens :]

    def _plan_decode(self, spans: Sequence[QuerySpan]) -> _Decode:
        tables: list[NDArray[np.int64]] = []
        blanks: list[NDArray[np.int64]] = []
        groups: list[_DecodeGroup] = []
        first_key = 0
        for padded_len, members in groupby(spans, key=lambda span: _round_up(span.context_len, TILE)):
            sequences = list(members)
            num_blocks = -(-padded_len // self._geometry.block_size)
            gathered_len = num_blocks * self._geometry.block_size
            lengths = np.array([span.context_len for span in sequences])
            positions = np.arange(padded_len)
            hidden = positions >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            groups.append(_DecodeGroup(sequences[0].first_row, len(sequences), first_key, gathered_len, padded_len, mask[:, None, None]))
            for span in sequences:
                tables.append(self._whole_table(span, num_blocks))
                blanks.append(np.arange(first_key + span.context_len, first_key + padded_len))
                first_key += gathered_len
        return _Decode(_gather_of(tables, blanks, first_key), tuple(groups))

    def _plan_chunk(self, span: QuerySpan) -> _Chunk:
        padded_len = _round_up(span.context_len, TILE)
        num_blocks = -(-padded_len // self._geometry.block_size)
        gather = _gather_of(
            [self._whole_table(span, num_blocks)], [np.arange(span.context_len, padded_len)], num_blocks * self._geometry.block_size
        )
        return _Chunk(gather, span.first_row, span.start, span.context_len)

    def _whole_table(self, span: QuerySpan, num_blocks: int) -> NDArray[np.int64]:
        """The blocks of a span's context; padded with block 0, whose copy is blanked."""
        used = -(-span.context_len // self._geometry.block_size)
        table = np.zeros(num_blocks, dtype=np.int64)
        table[:used] = span.block_table[:used]
        return table


def _gather_of(tables: list[NDArray[np.int64]], blanks: list[NDArray[np.int64]], num_tokens: int) -> _Gather:
    table = np.concatenate(tables) * 2
    blank = np.concatenate(blanks)
    return _Gather(
        half_blocks=torch.from_numpy(np.concatenate((table, table + 1))),
        num_tokens=num_tokens,
        blank_rows=torch.from_numpy(np.concatenate((blank, blank + num_tokens))),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
