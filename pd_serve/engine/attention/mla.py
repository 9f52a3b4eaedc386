"""Attention over paged latents in plain torch, for CUDA: gather a sequence's blocks, explicit scores in float32. NOT YET RUN ON A GPU.

Latents are keys and values at once and one head for all query heads (models/latent_attention.py); torch has no paged kernel for heads of
their size. On CPU they go through attention/cpu.py, whose invariance rules are kept here as far as shapes go; cuBLAS promises no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer

_TILE = 64
"""Queries of a prefill tile, and the step in which contexts are padded."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Sequences of equal padded context length, one query each (decode); or queries of one sequence between two multiples of _TILE."""

    first_row: int
    past_row: int
    blocks: Tensor
    """[num_sequences * num_blocks] int64, a padded context's behind the other's"""
    padded_len: int
    num_seen: Tensor
    """[num_sequences, num_queries] int64: keys that each query sees"""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    tiles: tuple[_Tile, ...]


class LatentAttention:
    """See AttentionBackend; `geometry` has one plane and one KV head."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> None:
        assert geometry.num_planes == geometry.num_kv_heads == 1, "keys and values: attention/varlen.py"
        self._geometry = geometry
        self._dtype = dtype
        self._device = device

    def plan(self, spans: Sequence[QuerySpan]) -> LatentPlan:
        decode = [span for span in spans if span.phase is Phase.DECODE]
        prefill = [span for span in spans if span.phase is Phase.PREFILL]
        groups = groupby(decode, key=lambda span: _round_up(span.context_len))
        tiles = [self._tile(tuple(members), padded_len) for padded_len, members in groups]
        return LatentPlan((*tiles, *(tile for span in prefill for tile in self._prefill_tiles(span))))

    def attend(self, queries: Tensor, layer: KVLayer, plan: LatentPlan, rule: LayerRule = EVERYTHING) -> Tensor:
        assert rule == EVERYTHING, "no model has latents and windows"
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for tile in plan.tiles:
            out[tile.first_row : tile.past_row] = self._attend_tile(queries[tile.first_row : tile.past_row], layer, tile)
        return out.flatten(1)

    def _attend_tile(self, queries: Tensor, layer: KVLayer, tile: _Tile) -> Tensor:
        """[num_rows, num_heads, head_dim] to the same shape."""
        geometry = self._geometry
        num_sequences, num_queries = tile.num_seen.shape
        gathered = torch.empty(len(tile.blocks), geometry.block_size * geometry.head_dim, dtype=self._dtype, device=self._device)
        layer.gather(tile.blocks, gathered)
        latents = gathered.view(num_sequences, -1, geometry.head_dim)[:, : tile.padded_len].float()
        is_hidden = torch.arange(tile.padded_len, device=self._device) >= tile.num_seen[..., None]
        # A mask alone would let a stale infinity through (0 * inf); the last query sees all that its sequence has.
        latents = latents.masked_fill(is_hidden[:, -1, :, None], 0.0)
        rows = queries.float().view(num_sequences, num_queries * geometry.num_heads, -1)
        scores = (rows @ latents.transpose(1, 2) * geometry.scale).view(num_sequences, num_queries, geometry.num_heads, -1)
        shares = scores.masked_fill_(is_hidden[:, :, None], float("-inf")).softmax(-1)
        return (shares.view(num_sequences, num_queries * geometry.num_heads, -1) @ latents).view(queries.shape).to(queries.dtype)

    def _prefill_tiles(self, span: QuerySpan) -> Iterator[_Tile]:
        start = span.start
        while start < span.context_len:
            past = min(start // _TILE * _TILE + _TILE, span.context_len)
            part = QuerySpan(span.phase, span.first_row + start - span.start, start, past - start, span.block_table)
            yield self._tile((part,), _round_up(past))
            start = past

    def _tile(self, spans: tuple[QuerySpan, ...], padded_len: int) -> _Tile:
        """Of spans with equally many queries in consecutive rows."""
        size = self._geometry.block_size
        table = np.zeros((len(spans), -(-padded_len // size)), dtype=np.int64)
        for row, span in zip(table, spans, strict=True):
            used = -(-span.context_len // size)
            row[:used] = span.block_table[:used]
        num_seen = np.array([[span.start + index + 1 for index in range(span.num_queries)] for span in spans])
        return _Tile(
            first_row=spans[0].first_row,
            past_row=spans[-1].first_row + spans[-1].num_queries,
            blocks=torch.from_numpy(table.ravel()).to(self._device, non_blocking=True),
            padded_len=padded_len,
            num_seen=torch.from_numpy(num_seen).to(self._device, non_blocking=True),
        )


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // _TILE) * _TILE
