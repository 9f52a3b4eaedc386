"""Paged attention on CPU: gather a sequence's blocks into a reused buffer, then torch's fused attention over contiguous keys.

Shapes that make the result a function of the sequence alone (base.py, rules 1 to 3; measured in bf16 and fp32):
  decode   one query per sequence, its heads grouped by KV head as rows ([KV heads, group, head_dim]: no repeated keys, no causal mask);
           keys padded to the next multiple of 64 and masked. Sequences of equal padded length share one call.
  prefill  tiles of 64 queries at absolute positions 0, 64, 128, …; a chunk that begins or ends inside a tile is padded with zero queries;
           keys cut at the tile's end.
  window   keys cut in front too, at the edge of the tile in which the oldest key lies that a query of the group or tile can see.
Softcaps and sinks, which the fused kernel does not know, go through scores of one sequence at a time in float32 (scores.py).
Keys beyond the sequence are zeroed after the gather: a mask alone would let a stale infinity through (0 * inf).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, FULL, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.attention.gather import Gather, GatherBuffer
from pd_serve.engine.attention.scores import ScoreRule, attend_by_scores
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer

TILE = 64
"""Queries per prefill tile, and the step in which keys are padded."""


@dataclass(frozen=True, slots=True)
class _View:
    """What a window leaves of the keys: those from `first` on, a multiple of TILE, and the mask of these, 0 or -inf."""

    first: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode sequences of equal padded length: consecutive rows of the step, first_row .. past_row - 1."""

    first_row: int
    past_row: int
    keys: Tensor
    """[num_sequences, num_kv_heads, padded_len, head_dim], a view of what the gather fills"""
    values: Tensor
    views: dict[int, _View]
    """By window; mask [num_sequences, 1, 1, past - first]."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries at positions `start` .. `start` + TILE - 1 of one sequence, as far as they lie in the chunk."""

    padded_rows: slice
    """Its queries among the chunk's, which begin at a tile's edge."""
    keys: Tensor
    """[1, num_kv_heads, start + TILE, head_dim], a view of what the gather fills"""
    values: Tensor
    views: dict[int, _View]
    """By window; mask [TILE, start + TILE - first]."""


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
        distance = torch.arange(TILE)[:, None] + self._reach - torch.arange(self._reach + TILE)[None]
        self._bands = {window: self._mask((distance < 0) | _is_past(distance, window)) for window in geometry.windows}

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

    def attend(self, queries: Tensor, layer: KVLayer, plan: CpuPlan, rule: LayerRule = EVERYTHING) -> Tensor:
        if not plan.chunks and len(plan.groups) == 1 and plan.decode_gather is not None:
            plan.decode_gather.run(layer)
            return self._attend_group(queries, plan.groups[0], rule).reshape(plan.num_tokens, -1)
        out = torch.empty(plan.num_tokens, self._geometry.num_heads, self._geometry.head_dim, dtype=self._dtype)
        self.attend_into(out, queries, layer, plan, rule)
        return out.view(plan.num_tokens, -1)

    def attend_into(self, out: Tensor, queries: Tensor, layer: KVLayer, plan: CpuPlan, rule: LayerRule) -> None:
        """As attend, to the rows of `out` [num_tokens, num_heads, head_dim] that the plan is for."""
        if plan.decode_gather is not None:
            plan.decode_gather.run(layer)
            for group in plan.groups:
                rows = slice(group.first_row, group.past_row)
                out[rows] = self._attend_group(queries[rows], group, rule).reshape(-1, *out.shape[1:])
        for chunk in plan.chunks:
            chunk.gather.run(layer)
            out[chunk.first_row : chunk.past_row] = self._attend_chunk(queries[chunk.first_row : chunk.past_row], chunk, rule)

    def _attend_group(self, queries: Tensor, group: _DecodeGroup, rule: LayerRule) -> Tensor:
        """[num_sequences, num_heads, head_dim] to [num_sequences, num_kv_heads, group_size, head_dim]."""
        geometry = self._geometry
        grouped = queries.view(queries.shape[0], geometry.num_kv_heads, -1, geometry.head_dim)
        view = group.views[rule.window]
        keys, values = group.keys[:, :, view.first :], group.values[:, :, view.first :]
        if geometry.softcap or rule.sinks is not None:
            sinks = None if rule.sinks is None else rule.sinks.view(geometry.num_kv_heads, -1, 1)
            return attend_by_scores(grouped, keys, values, view.mask, ScoreRule(geometry.scale, geometry.softcap, sinks))
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=view.mask, scale=geometry.scale)

    def _attend_chunk(self, queries: Tensor, chunk: _Chunk, rule: LayerRule) -> Tensor:
        """[num_queries, num_heads, head_dim] to the same shape."""
        num_queries = queries.shape[0]
        if num_queries != chunk.padded_len:
            padded = queries.new_zeros(chunk.padded_len, *queries.shape[1:])
            padded[chunk.offset : chunk.offset + num_queries] = queries
            queries = padded
        heads_first = queries.transpose(0, 1)[None]
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for tile in chunk.tiles:
            out[tile.padded_rows] = self._attend_tile(heads_first[:, :, tile.padded_rows], tile, rule)[0].transpose(0, 1)
        return out[chunk.offset : chunk.offset + num_queries]

    def _attend_tile(self, queries: Tensor, tile: _Tile, rule: LayerRule) -> Tensor:
        """[1, num_heads, TILE, head_dim] to the same shape."""
        geometry, view = self._geometry, tile.views[rule.window]
        keys, values = tile.keys[:, :, view.first :], tile.values[:, :, view.first :]
        if geometry.softcap or rule.sinks is not None:
            group_size = geometry.num_heads // geometry.num_kv_heads
            keys, values = keys.repeat_interleave(group_size, 1), values.repeat_interleave(group_size, 1)
            sinks = None if rule.sinks is None else rule.sinks.view(-1, 1, 1)
            return attend_by_scores(queries, keys, values, view.mask[None], ScoreRule(geometry.scale, geometry.softcap, sinks))
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=view.mask, scale=geometry.scale, enable_gqa=self._has_groups)

    def _decode_groups(self, spans: Sequence[QuerySpan], padded_lens: Sequence[int]) -> Iterator[_DecodeGroup]:
        first_block, num_blocks = 0, sum(self._buffer.num_blocks_for(padded_len) for padded_len in padded_lens)
        for padded_len, members in groupby(zip(spans, padded_lens, strict=True), key=lambda member: member[1]):
            sequences = [span for span, _ in members]
            keys, values = self._buffer.views(first_block, len(sequences), padded_len, num_blocks)
            lengths = torch.tensor([span.context_len for span in sequences])
            distance = lengths[:, None] - 1 - torch.arange(padded_len)
            views = {}
            for window in self._geometry.windows:
                first = _first_key(padded_len - TILE, window)
                seen = distance[:, first:]
                views[window] = _View(first, self._mask((seen < 0) | _is_past(seen, window))[:, None, None])
            first_row = sequences[0].first_row
            yield _DecodeGroup(first_row, first_row + len(sequences), keys, values, views)
            first_block += len(sequences) * self._buffer.num_blocks_for(padded_len)

    def _chunk(self, span: QuerySpan) -> _Chunk:
        first, past = span.start // TILE * TILE, _round_up(span.context_len, TILE)
        keys, values = self._buffer.views(0, 1, past, self._buffer.num_blocks_for(past))
        tiles = tuple(
            _Tile(
                padded_rows=slice(start - first, start - first + TILE),
                keys=keys[:, :, : start + TILE],
                values=values[:, :, : start + TILE],
                views={
                    window: _View(first_key, band[:, self._reach - start + first_key : self._reach + TILE])
                    for window, band in self._bands.items()
                    for first_key in (_first_key(start, window),)
                },
            )
            for start in range(first, past, TILE)
        )
        rows = (span.first_row, span.first_row + span.num_queries)
        return _Chunk(self._buffer.gather([span], [past]), *rows, span.start - first, past - first, tiles)

    def _mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))


def _first_key(oldest_query: int, window: int) -> int:
    """Edge of the tile that holds the oldest key which a query at `oldest_query` or later sees."""
    return 0 if window == FULL else max(0, oldest_query - window + 1) // TILE * TILE


def _is_past(distance: Tensor, window: int) -> Tensor:
    """Of keys so many tokens before their query: whether the window has left them behind."""
    return distance >= window if window != FULL else torch.zeros_like(distance, dtype=torch.bool)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
