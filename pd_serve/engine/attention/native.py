"""Paged attention on CPU with compiled operators: decoding sequences read their blocks where they lie, prompts go the way of cpu.py.

A query's result depends on its sequence and position alone: one thread takes the keys of a pair of sequence and KV head from first to last
(native/attention.cpp). It differs from cpu.py's in rounding: probabilities stay in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.attention.cpu import CpuAttention, CpuPlan
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer
from pd_serve.engine.native.operators import DecodePlan, Geometry, Operators, geometry_of


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Valid until the next plan is made."""

    num_tokens: int
    decode: DecodePlan | None
    prefill: CpuPlan | None


class NativeAttention:
    """For geometries without softcap and sinks, with two planes. Used by one thread."""

    def __init__(self, geometry: AttentionGeometry, operators: Operators) -> None:
        self._geometry = geometry
        self._operators = operators
        self._prefill = CpuAttention(geometry, operators.dtype)
        self._pool: Geometry | None = None
        self._scores = torch.empty(0)

    def plan(self, spans: Sequence[QuerySpan]) -> NativePlan:
        decode = [span for span in spans if span.phase is Phase.DECODE]
        prefill = [span for span in spans if span.phase is Phase.PREFILL]
        return NativePlan(
            num_tokens=sum(span.num_queries for span in spans),
            decode=self._plan_decode(decode) if decode else None,
            prefill=self._prefill.plan(prefill) if prefill else None,
        )

    def attend(self, queries: Tensor, layer: KVLayer, plan: NativePlan, rule: LayerRule = EVERYTHING) -> Tensor:
        geometry = self._geometry
        out = torch.empty(plan.num_tokens, geometry.num_heads * geometry.head_dim, dtype=queries.dtype)
        if plan.decode is not None:
            if queries.stride(1) != geometry.head_dim:
                queries = queries.contiguous()
            self._operators.attend(self.pool_geometry(layer), plan.decode, queries, layer.slab, out, rule.window)
        if plan.prefill is not None:
            self._prefill.attend_into(out.view(-1, geometry.num_heads, geometry.head_dim), queries, layer, plan.prefill, rule)
        return out

    def pool_geometry(self, layer: KVLayer) -> Geometry:
        """Every layer's is alike."""
        if self._pool is None:
            self._pool = geometry_of(layer.slab, self._geometry.num_heads, self._geometry.scale)
        return self._pool

    def _plan_decode(self, spans: Sequence[QuerySpan]) -> DecodePlan:
        geometry = self._geometry
        lengths = [span.context_len for span in spans]
        counts = [-(-length // geometry.block_size) for length in lengths]
        tables = np.zeros((len(spans), max(counts)), dtype=np.int32)
        for row, span, count in zip(tables, spans, counts, strict=True):
            row[:count] = span.block_table[:count]
        size = self._operators.scores_size(max(lengths))
        if self._scores.numel() < size:
            self._scores = torch.empty(max(size, 2 * self._scores.numel()))
        work = sum(lengths) * geometry.num_heads
        return self._operators.plan_decode(torch.from_numpy(tables), torch.tensor(lengths, dtype=torch.int32), self._scores, work)
