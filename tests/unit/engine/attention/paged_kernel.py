"""torch's paged varlen kernel in plain torch operations on CPU: every row by itself, over the longest context, so that no result depends
on the company or on how wide the block table is. With decode rows only, it asks the host nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn, varlen_attn_out

from pd_serve.engine.attention.base import AttentionGeometry
from pd_serve.engine.attention.varlen import VarlenAttention


def varlen_on_cpu(geometry: AttentionGeometry, *_: object, **__: object) -> VarlenAttention:
    kernel = paged_kernel(geometry)

    def out_kernel(out: Tensor, *positional: Any, **options: Any) -> None:
        inspect.signature(varlen_attn_out).bind(out, *positional, **options)
        out.copy_(kernel(*positional, **options))

    return VarlenAttention(geometry, torch.device("cpu"), kernel, out_kernel)


def paged_kernel(geometry: AttentionGeometry) -> Callable[..., Tensor]:
    width = -(-geometry.max_len // geometry.block_size)
    group = geometry.num_heads // geometry.num_kv_heads

    def kernel(query: Tensor, key: Tensor, value: Tensor, *positional: Any, **options: Any) -> Tensor:
        inspect.signature(varlen_attn).bind(query, key, value, *positional, **options)
        cumulative, _, max_queries, _ = positional
        lens, table = options["seqused_k"], options["block_table"]
        if max_queries > 1:
            lens, table = _by_query(cumulative, lens, table)
        table = F.pad(table, (0, width - table.shape[1]))
        positions = torch.arange(width * geometry.block_size)
        is_hidden = positions >= lens[:, None]
        if (left := options["window_size"][0]) >= 0:
            is_hidden = is_hidden | (positions < lens[:, None] - 1 - left)
        keys, values = (pages.index_select(0, table.flatten()).view(len(lens), -1, *pages.shape[2:]).double() for pages in (key, value))
        keys, values = (rows.masked_fill(is_hidden[..., None, None], 0.0).repeat_interleave(group, dim=2) for rows in (keys, values))
        scores = (query[:, None].double() * keys).sum(-1) * options["scale"]
        shares = scores.masked_fill(is_hidden[..., None], float("-inf")).softmax(1)
        return (shares[..., None] * values).sum(1).to(query.dtype)

    return kernel


def _by_query(cumulative: Tensor, lens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    counts = cumulative.diff()
    sequences = torch.repeat_interleave(torch.arange(len(lens)), counts)
    behind = cumulative[1:][sequences] - torch.arange(int(cumulative[-1])) - 1
    return lens[sequences] - behind, table[sequences]
