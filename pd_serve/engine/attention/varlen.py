"""Paged attention on CUDA through torch's own varlen kernel (torch >= 2.13): block table, grouped heads, fixed split. NOT YET RUN ON A GPU.

`num_splits=1` is what torch documents for results that do not depend on the batch. Decode and prefill are two calls (base.py, rule 1).
Captured decode steps (graphs.py) go through `varlen_attn_out`, over tables in memory that keeps its place.
The kernel's older releases wanted pages of a multiple of 256 tokens; whether this one does is to be tested first on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, FULL, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.batch import Phase
from pd_serve.engine.host_mirror import HostMirror
from pd_serve.engine.kv_cache import KVLayer
from pd_serve.errors import ModelError

VarlenKernel = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn, or the reference that tests put in its place."""


@dataclass(frozen=True, slots=True)
class _VarlenCall:
    """One kernel call over consecutive rows."""

    first_row: int
    past_row: int
    cumulative_queries: Tensor
    """[num_sequences + 1] int32"""
    context_lens: Tensor
    """[num_sequences] int32"""
    block_table: Tensor
    """[num_sequences, max_blocks] int32, unused tail 0"""
    max_queries: int
    max_context: int
    is_captured: bool = False


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    calls: tuple[_VarlenCall, ...]


class VarlenAttention:
    def __init__(
        self, geometry: AttentionGeometry, device: torch.device, kernel: VarlenKernel, out_kernel: VarlenKernel | None = None
    ) -> None:
        """`out_kernel`: the same, with the result's memory as first argument; None: nothing will be captured.

        Raises ModelError where the model needs what the kernel does not compute.
        """
        if geometry.softcap:
            raise ModelError("attention on CUDA does not honour logit softcaps (engine.device = cpu does)")
        _refuse_sinks(is_there=geometry.has_sinks)
        self._geometry = geometry
        self._device = device
        self._kernel = kernel
        self._out_kernel = out_kernel

    def plan(self, spans: Sequence[QuerySpan]) -> VarlenPlan:
        phases = ([span for span in spans if span.phase is phase] for phase in (Phase.DECODE, Phase.PREFILL))
        return VarlenPlan(tuple(self._plan_call(members) for members in phases if members))

    def attend(self, queries: Tensor, layer: KVLayer, plan: VarlenPlan, rule: LayerRule = EVERYTHING) -> Tensor:
        _refuse_sinks(is_there=rule.sinks is not None)
        keys, values = layer.slab.unbind(1)
        parts = [self._call(queries[call.first_row : call.past_row], keys, values, call, rule) for call in plan.calls]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(out.shape[0], -1)

    def decode_buffers(self, max_rows: int, max_len: int) -> VarlenBuffers:
        assert self._out_kernel is not None, "made for steps that are not captured"
        return VarlenBuffers(self._geometry.block_size, max_rows, max_len, self._device)

    def _call(self, queries: Tensor, keys: Tensor, values: Tensor, call: _VarlenCall, rule: LayerRule) -> Tensor:
        positional = (queries, keys, values, call.cumulative_queries, None, call.max_queries, call.max_context)
        options = {
            "scale": self._geometry.scale,
            "window_size": (-1 if rule.window == FULL else rule.window - 1, 0),
            "enable_gqa": self._geometry.num_heads != self._geometry.num_kv_heads,
            "seqused_k": call.context_lens,
            "block_table": call.block_table,
            "num_splits": 1,
        }
        if not call.is_captured:
            out: Tensor = self._kernel(*positional, **options)
            return out
        assert self._out_kernel is not None, "decode_buffers() has made this plan"
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self._out_kernel(out, *positional, **options)
        return out

    def _plan_call(self, spans: Sequence[QuerySpan]) -> _VarlenCall:
        context_lens = np.array([span.context_len for span in spans], dtype=np.int32)
        block_counts = -(-context_lens // self._geometry.block_size)
        table = np.zeros((len(spans), int(block_counts.max())), dtype=np.int32)
        for row, (span, count) in enumerate(zip(spans, block_counts, strict=True)):
            table[row, :count] = span.block_table[:count]
        cumulative = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum([span.num_queries for span in spans], out=cumulative[1:])
        return _VarlenCall(
            first_row=spans[0].first_row,
            past_row=spans[-1].first_row + spans[-1].num_queries,
            cumulative_queries=torch.from_numpy(cumulative).to(self._device, non_blocking=True),
            context_lens=torch.from_numpy(context_lens).to(self._device, non_blocking=True),
            block_table=torch.from_numpy(table).to(self._device, non_blocking=True),
            max_queries=max(span.num_queries for span in spans),
            max_context=int(context_lens.max()),
        )


class VarlenBuffers:
    """See DecodeBuffers. The kernel is told the longest context there may be; each sequence's own length bounds what it reads."""

    def __init__(self, block_size: int, max_rows: int, max_len: int, device: torch.device) -> None:
        self._block_size = block_size
        self._max_len = max_len
        self._cumulative = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._context_lens = HostMirror(max_rows, torch.int32, device)
        max_blocks = -(-max_len // block_size)
        self._block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._sent_table = HostMirror(max_rows * max_blocks, torch.int32, device)
        """[num_rows, blocks of the longest context], from the front: what a step's table has of columns."""

    def plan(self, num_rows: int) -> VarlenPlan:
        call = _VarlenCall(
            first_row=0,
            past_row=num_rows,
            cumulative_queries=self._cumulative[: num_rows + 1],
            context_lens=self._context_lens.device[:num_rows],
            block_table=self._block_table[:num_rows],
            max_queries=1,
            max_context=self._max_len,
            is_captured=True,
        )
        return VarlenPlan((call,))

    def fill(self, spans: Sequence[QuerySpan], num_rows: int, idle_block: int) -> None:
        counts = [-(-span.context_len // self._block_size) for span in spans]
        width = max(counts, default=1)
        lens = self._context_lens.open().numpy()
        table = self._sent_table.open()[: num_rows * width].view(num_rows, width).numpy()
        for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
            table[row, :count] = span.block_table[:count]
            table[row, count:] = 0
            lens[row] = span.context_len
        lens[len(spans) : num_rows] = 1
        table[len(spans) :] = idle_block
        self._context_lens.send(num_rows)
        self._sent_table.send(num_rows * width)
        # What an earlier step left in the columns behind is never read.
        self._block_table[:num_rows, :width].copy_(self._sent_table.device[: num_rows * width].view(num_rows, width))


def _refuse_sinks(*, is_there: bool) -> None:
    if is_there:
        raise ModelError("attention on CUDA does not honour attention sinks (engine.device = cpu does)")
