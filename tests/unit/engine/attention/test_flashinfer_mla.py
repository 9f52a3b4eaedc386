"""FlashInfer's MLA path on CPU: its kernels are replaced by the definition, fed with exactly the arguments that the real ones get."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pd_serve.engine.attention import registry
from pd_serve.engine.attention.base import AttentionGeometry, LatentSettings, QuerySpan
from pd_serve.engine.attention.flashinfer_mla import FlashInferLatentAttention, LatentKernels, open_kernels, takes
from pd_serve.engine.attention.mla import LatentAttention
from pd_serve.engine.attention.registry import attention_for
from pd_serve.engine.batch import Phase
from pd_serve.errors import ConfigError
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans
from tests.unit.engine.attention.test_cpu import MIXES

NUM_BLOCKS, RANK, ROTARY = 200, 128, 64
GEOMETRY = AttentionGeometry(4, 1, RANK + ROTARY, 16, 256, query_scale=0.3, num_planes=1, latent_rank=RANK)
CUDA = torch.device("cuda")


class Definition:
    """Takes what BatchMLAPagedAttentionWrapper of flashinfer-python 0.7.4 takes."""

    planned: dict[str, Any]

    def plan(
        self,
        *,
        metadata: tuple[Tensor, Tensor, Tensor, Tensor],
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert all(tensor.dtype is torch.int32 for tensor in metadata)
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (4, RANK, ROTARY, 16, True)
        assert sm_scale == 0.3
        assert q_data_type is kv_data_type is torch.bfloat16
        self.metadata = metadata

    def run(self, *, query: Tensor, kv_cache: Tensor) -> Tensor:
        assert query.shape[1:] == (4, RANK + ROTARY)
        assert kv_cache.shape[1:] == (16, RANK + ROTARY)
        queries_at, blocks_at, blocks, lens = (tensor.tolist() for tensor in self.metadata)
        spans = [
            QuerySpan(Phase.PREFILL, first, length - (past - first), past - first, tuple(blocks[first_block:past_block]))
            for first, past, first_block, past_block, length in zip(
                queries_at, queries_at[1:], blocks_at, blocks_at[1:], lens, strict=False
            )
        ]
        slab = kv_cache[:, None, :, None].expand(-1, 2, -1, -1, -1)
        return attend(query, slab, spans, GEOMETRY).view(query.shape)[..., :RANK]


def _kernels() -> LatentKernels:
    return LatentKernels(Definition(), Definition(), lambda *tensors: tensors)


@pytest.mark.parametrize("name", sorted(MIXES))
def test_equals_the_definition_as_far_as_values_go(name: str) -> None:
    torch.manual_seed(0)
    spans = scattered_spans(MIXES[name], 16, NUM_BLOCKS)
    slab = torch.randn(NUM_BLOCKS, 1, 16, 1, RANK + ROTARY)
    queries = torch.randn(sum(span.num_queries for span in spans), 4, RANK + ROTARY)
    attention = FlashInferLatentAttention(GEOMETRY, torch.bfloat16, _kernels())
    plan = attention.plan(spans)
    assert len(plan.calls) == len({span.phase for span in spans})
    out = attention.attend(queries, layer_of(slab), plan).view(len(queries), 4, -1)
    expected = attend(queries, slab.expand(-1, 2, -1, -1, -1), spans, GEOMETRY).view(len(queries), 4, -1)
    torch.testing.assert_close(out[..., :RANK], expected[..., :RANK])
    assert out.shape == expected.shape


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"latent_rank": 96}, torch.bfloat16),
        ({"head_dim": RANK + 16}, torch.bfloat16),
        ({"latent_rank": 0}, torch.bfloat16),
        ({}, torch.float32),
    ],
)
def test_other_sizes_and_types_are_for_plain_torch(changes: dict[str, int], dtype: torch.dtype) -> None:
    assert takes(GEOMETRY, torch.bfloat16)
    geometry = replace(GEOMETRY, **changes)
    assert not takes(geometry, dtype)
    assert isinstance(attention_for(geometry, dtype, CUDA), LatentAttention)
    with pytest.raises(ConfigError, match="multiple of 128"):
        attention_for(geometry, dtype, CUDA, LatentSettings("flashinfer"))


def test_where_it_is_missing_auto_is_plain_torch_and_a_wish_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert isinstance(attention_for(GEOMETRY, torch.bfloat16, CUDA), LatentAttention)
    assert "pd-serve[flashinfer]" in caplog.text
    with pytest.raises(ConfigError, match=r"pd-serve\[flashinfer\]"):
        attention_for(GEOMETRY, torch.bfloat16, CUDA, LatentSettings("flashinfer"))


def test_an_older_version_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("flashinfer.mla")
    old.BatchMLAPagedAttentionWrapper = Definition  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", old)
    with pytest.raises(ConfigError, match="MLAPlanMetadata"):
        open_kernels(torch.device("cpu"))


def test_a_setting_and_a_scaled_pool_keep_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_serve.engine.attention.flashinfer_mla.open_kernels", lambda device: _kernels())
    assert isinstance(registry.attention_for(GEOMETRY, torch.bfloat16, CUDA), FlashInferLatentAttention)
    assert isinstance(attention_for(GEOMETRY, torch.bfloat16, CUDA, LatentSettings("torch")), LatentAttention)
    assert isinstance(attention_for(GEOMETRY, torch.bfloat16, CUDA, LatentSettings(has_scaled_cache=True)), LatentAttention)
