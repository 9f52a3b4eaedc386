"""Attention over paged latents through FlashInfer's MLA kernels, which read the pool in place. NOT YET RUN ON A GPU.

The one file that imports flashinfer (extra `flashinfer`, which pins the version: its planning interface has moved before). Decode and
prefill are two plans (base.py, rule 1). FlashInfer splits long contexts among its workers by what else is in the batch, so that results
are close, not bit-equal, from batch to batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.attention.base import EVERYTHING, AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.batch import Phase
from pd_serve.engine.kv_cache import KVLayer
from pd_serve.errors import ConfigError

_WORKSPACE_NBYTES = 128 << 20
"""What FlashInfer's documentation starts with, for partial results."""
_LATENT_MULTIPLE, _ROTARY_MULTIPLE = 128, 64
"""Of the sizes that its generated kernels take."""


class LatentKernel(Protocol):
    """flashinfer.mla.BatchMLAPagedAttentionWrapper, or the definition that tests put in its place."""

    def plan(self, **arguments: Any) -> None: ...

    def run(self, **arguments: Any) -> Tensor:
        """[num_rows, num_heads, latent_rank]"""
        ...


class LatentKernels(NamedTuple):
    """`decode` and `prefill` keep a plan each; they may share their workspace, since one runs after the other."""

    decode: LatentKernel
    prefill: LatentKernel
    metadata: Any
    """Makes the `metadata` of plan() from (cumulative queries, cumulative blocks, blocks, context lengths): int32 on the host."""


@dataclass(frozen=True, slots=True)
class _Call:
    kernel: LatentKernel
    first_row: int
    past_row: int


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Valid until the next plan is made: the kernels keep it."""

    calls: tuple[_Call, ...]


class FlashInferLatentAttention:
    """See AttentionBackend; `geometry` has one plane and one KV head."""

    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype, kernels: LatentKernels) -> None:
        assert takes(geometry, dtype), "attention/mla.py attends where these kernels cannot"
        self._geometry = geometry
        self._dtype = dtype
        self._kernels = kernels

    def plan(self, spans: Sequence[QuerySpan]) -> FlashInferPlan:
        phases = ((self._kernels.decode, Phase.DECODE), (self._kernels.prefill, Phase.PREFILL))
        members = ((kernel, [span for span in spans if span.phase is phase]) for kernel, phase in phases)
        return FlashInferPlan(tuple(self._plan_call(kernel, own) for kernel, own in members if own))

    def attend(self, queries: Tensor, layer: KVLayer, plan: FlashInferPlan, rule: LayerRule = EVERYTHING) -> Tensor:
        assert rule == EVERYTHING, "no model has latents and windows"
        geometry = self._geometry
        pages = layer.slab.view(-1, geometry.block_size, geometry.head_dim)
        parts = [call.kernel.run(query=queries[call.first_row : call.past_row], kv_cache=pages) for call in plan.calls]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        # The kernel sums latents alone; a cached vector's rotated part is no value, and nobody reads it.
        return F.pad(out, (0, geometry.head_dim - geometry.latent_rank)).flatten(1)

    def _plan_call(self, kernel: LatentKernel, spans: Sequence[QuerySpan]) -> _Call:
        geometry = self._geometry
        counts = [-(-span.context_len // geometry.block_size) for span in spans]
        blocks = np.concatenate([np.array(span.block_table[:count], np.int32) for span, count in zip(spans, counts, strict=True)])
        kernel.plan(
            metadata=self._kernels.metadata(
                _cumulative([span.num_queries for span in spans]),
                _cumulative(counts),
                torch.from_numpy(blocks),
                torch.tensor([span.context_len for span in spans], dtype=torch.int32),
            ),
            num_heads=geometry.num_heads,
            head_dim_ckv=geometry.latent_rank,
            head_dim_kpe=geometry.head_dim - geometry.latent_rank,
            page_size=geometry.block_size,
            causal=True,
            sm_scale=geometry.scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return _Call(kernel, spans[0].first_row, spans[-1].first_row + spans[-1].num_queries)


def takes(geometry: AttentionGeometry, dtype: torch.dtype) -> bool:
    """Whether the kernels know these sizes and this type."""
    rotary = geometry.head_dim - geometry.latent_rank
    is_sized = geometry.latent_rank > 0 and geometry.latent_rank % _LATENT_MULTIPLE == 0 and rotary % _ROTARY_MULTIPLE == 0
    return is_sized and geometry.num_planes == geometry.num_kv_heads == 1 and dtype in (torch.float16, torch.bfloat16)


def open_kernels(device: torch.device) -> LatentKernels:
    """Raises ConfigError where FlashInfer, or the version this was written for, is missing."""
    try:
        module = import_module("flashinfer.mla")
        wrapper, metadata = module.BatchMLAPagedAttentionWrapper, module.MLAPlanMetadata.csr
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"FlashInfer's MLA kernels are missing ({error}): pip install 'pd-serve[flashinfer]'") from error
    workspace = torch.empty(_WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
    return LatentKernels(wrapper(workspace), wrapper(workspace), metadata)


def _cumulative(counts: Sequence[int]) -> Tensor:
    """[len(counts) + 1] int32, from 0"""
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    return torch.from_numpy(ends)
