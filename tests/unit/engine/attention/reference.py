"""Attention as its definition says, one query at a time in double precision, over a paged slab."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import PlainLayer
from pd_serve.kv.layout import KVDtype, KVLayout


def layer_of(slab: Tensor) -> PlainLayer:
    """`slab` [num_blocks, num_planes, block_size, num_kv_heads, head_dim] as a layer of a pool."""
    num_blocks, num_planes, block_size, num_heads, head_dim = slab.shape
    layout = KVLayout(1, num_heads, head_dim, block_size, num_blocks, KVDtype.FLOAT32, num_planes)
    return PlainLayer(layout, slab.view(num_blocks * num_planes, -1))


def slab_and_queries(geometry: AttentionGeometry, num_blocks: int, num_queries: int) -> tuple[Tensor, Tensor]:
    """Random, the same in every run: a slab of keys and values as `layer_of` takes it, queries [num_queries, num_heads, head_dim]."""
    torch.manual_seed(0)
    slab = torch.randn(num_blocks, 2, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    return slab, torch.randn(num_queries, geometry.num_heads, geometry.head_dim)


def attend(queries: Tensor, slab: Tensor, spans: Sequence[QuerySpan], geometry: AttentionGeometry, rule: LayerRule = EVERYTHING) -> Tensor:
    out = torch.empty(queries.shape, dtype=torch.float64)
    group = geometry.num_heads // geometry.num_kv_heads
    for span in spans:
        for index in range(span.num_queries):
            position = span.start + index
            positions = range(max(0, position - rule.window + 1) if rule.window else 0, position + 1)
            places = [(span.block_table[p // geometry.block_size], p % geometry.block_size) for p in positions]
            keys, values = (torch.stack([slab[block, half, offset] for block, offset in places]).double() for half in (0, 1))
            for head in range(geometry.num_heads):
                scores = keys[:, head // group] @ queries[span.first_row + index, head].double() * geometry.scale
                if geometry.softcap:
                    scores = torch.tanh(scores / geometry.softcap) * geometry.softcap
                if rule.sinks is not None:
                    scores = torch.cat((scores, rule.sinks[head : head + 1].double()))
                shares = torch.softmax(scores, 0)[: len(places)]
                out[span.first_row + index, head] = shares @ values[:, head // group]
    return out.flatten(1)


def scattered_spans(shapes: Sequence[tuple[Phase, int, int]], block_size: int, num_blocks: int) -> tuple[QuerySpan, ...]:
    """Spans of (phase, start, number of queries), in row order, over disjoint shuffled blocks."""
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    spans, first_row = [], 0
    for phase, start, num_queries in shapes:
        count = -(-(start + num_queries) // block_size)
        spans.append(QuerySpan(phase, first_row, start, num_queries, tuple(blocks[:count])))
        del blocks[:count]
        first_row += num_queries
    return tuple(spans)
