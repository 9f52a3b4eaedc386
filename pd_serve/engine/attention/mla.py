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
    """Queries at one multiple of _TILE and behind it, before the next; of a decode group, one of each sequence."""

    first_row: int
    past_row: int
    num_keys: int
    """Of each sequence: a multiple of _TILE."""
    is_hidden: Tensor
    """[num_sequences, num_queries, 1, num_keys] bool: keys that a query does not see"""


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode sequences of equal padded length; or one prefill chunk. One gather."""

    blocks: Tensor
    """[num_sequences * num_blocks] int64, one sequence's behind the other's"""
    is_blank: Tensor
    """[num_sequences, padded_len, 1] bool: beyond the sequence"""
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class LatentPlan:
    groups: tuple[_Group, ...]


class LatentAttention:
    """See AttentionBackend; `geometry` has one plane and one KV head."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device) -> None:
        assert geometry.num_planes == geometry.num_kv_heads == 1, "keys and values: attention/varlen.py"
        self._geometry = geometry
        self._dtype = dtype
        self._device = device

    def plan(self, spans: Sequence[QuerySpan]) -> LatentPlan:
        decode = [span for span in spans if span.phase is Phase.DECODE]
        by_length = groupby(decode, key=lambda span: _round_up(span.context_len))
        chunks = ((span,) for span in spans if span.phase is Phase.PREFILL)
        return LatentPlan(tuple(self._group(members) for members in (*(tuple(group) for _, group in by_length), *chunks)))

    def attend(self, queries: Tensor, layer: KVLayer, plan: LatentPlan, rule: LayerRule = EVERYTHING) -> Tensor:
        assert rule == EVERYTHING, "no model has latents and windows"
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in plan.groups:
            latents = self._gather(layer, group)
            for tile in group.tiles:
                rows = slice(tile.first_row, tile.past_row)
                out[rows] = self._attend_tile(queries[rows], latents[:, : tile.num_keys], tile)
        return out.flatten(1)

    def _gather(self, layer: KVLayer, group: _Group) -> Tensor:
        """[num_sequences, padded_len, head_dim] float32. Zero beyond a sequence: a mask alone would let a stale infinity through."""
        geometry = self._geometry
        num_sequences, padded_len, _ = group.is_blank.shape
        gathered = torch.empty(len(group.blocks), geometry.block_size * geometry.head_dim, dtype=self._dtype, device=self._device)
        layer.gather(group.blocks, gathered)
        latents = gathered.view(num_sequences, -1, geometry.head_dim)[:, :padded_len]
        return latents.float().masked_fill(group.is_blank, 0.0)

    def _attend_tile(self, queries: Tensor, latents: Tensor, tile: _Tile) -> Tensor:
        """`queries` [num_rows, num_heads, head_dim], `latents` [num_sequences, num_keys, head_dim]; to the queries' shape."""
        num_sequences, num_queries = tile.is_hidden.shape[:2]
        rows = queries.float().view(num_sequences, num_queries * queries.shape[1], -1)
        scores = (rows @ latents.transpose(1, 2) * self._geometry.scale).view(num_sequences, num_queries, queries.shape[1], -1)
        shares = scores.masked_fill_(tile.is_hidden, float("-inf")).softmax(-1)
        return (shares.view(num_sequences, rows.shape[1], -1) @ latents).view(queries.shape).to(queries.dtype)

    def _group(self, spans: tuple[QuerySpan, ...]) -> _Group:
        """Of one span, or of several of one query each in consecutive rows."""
        size, lengths = self._geometry.block_size, np.array([span.context_len for span in spans])
        padded_len = _round_up(int(lengths.max()))
        table = np.zeros((len(spans), -(-padded_len // size)), dtype=np.int64)
        for row, span in zip(table, spans, strict=True):
            used = -(-span.context_len // size)
            row[:used] = span.block_table[:used]
        return _Group(
            blocks=torch.from_numpy(table.ravel()).to(self._device, non_blocking=True),
            is_blank=torch.from_numpy(np.arange(padded_len) >= lengths[:, None])[..., None].to(self._device, non_blocking=True),
            tiles=tuple(self._tiles(spans)),
        )

    def _tiles(self, spans: tuple[QuerySpan, ...]) -> Iterator[_Tile]:
        start, end = spans[0].start, spans[0].context_len
        while start < end:
            # A decode group is one tile: its sequences have one query each, which the first of them stands for here.
            past = min(start // _TILE * _TILE + _TILE, end)
            num_seen = np.array([[span.start + start - spans[0].start + index + 1 for index in range(past - start)] for span in spans])
            num_keys = _round_up(int(num_seen.max()))
            is_hidden = torch.from_numpy(np.arange(num_keys) >= num_seen[..., None])[:, :, None]
            first_row = spans[0].first_row + start - spans[0].start
            yield _Tile(first_row, first_row + num_seen.size, num_keys, is_hidden.to(self._device, non_blocking=True))
            start = past


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // _TILE) * _TILE
