from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pd_serve.engine.attention.base import AttentionGeometry
from pd_serve.engine.attention.cpu import CpuAttention
from pd_serve.engine.batch import Phase
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans

P, D = Phase.PREFILL, Phase.DECODE
NUM_BLOCKS = 200
MIXES = {
    "one decode": [(D, 9, 1)],
    "decodes of one padded length": [(D, 3, 1), (D, 40, 1)],
    "decodes of several": [(D, 0, 1), (D, 63, 1), (D, 64, 1), (D, 150, 1)],
    "a whole prompt": [(P, 0, 70)],
    "a chunk inside a tile": [(P, 10, 5)],
    "a chunk over tiles": [(P, 60, 80)],
    "an aligned chunk": [(P, 64, 64)],
    "a chunk of one token": [(P, 100, 1)],
    "all together": [(D, 3, 1), (D, 130, 1), (P, 0, 64), (P, 65, 3)],
}


def _slab_and_queries(geometry: AttentionGeometry, num_queries: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    slab = torch.randn(NUM_BLOCKS, 2, geometry.block_size, geometry.num_kv_heads, geometry.head_dim)
    return slab, torch.randn(num_queries, geometry.num_heads, geometry.head_dim)


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(4, 2, 16), (3, 3, 7), (6, 1, 100)])
def test_equals_the_definition(name: str, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    geometry = AttentionGeometry(num_heads, num_kv_heads, 8, block_size, 256)
    spans = scattered_spans(MIXES[name], block_size, NUM_BLOCKS)
    slab, queries = _slab_and_queries(geometry, sum(span.num_queries for span in spans))
    backend = CpuAttention(geometry, torch.float32)
    out = backend.attend(queries, layer_of(slab), backend.plan(spans))
    torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry), rtol=1e-4, atol=1e-5)


def test_what_lies_beyond_a_sequence_has_no_influence() -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256)
    spans = scattered_spans([(D, 20, 1), (P, 30, 10)], 16, NUM_BLOCKS)
    slab, queries = _slab_and_queries(geometry, 11)
    backend = CpuAttention(geometry, torch.float32)
    expected = backend.attend(queries, layer_of(slab), backend.plan(spans))
    poisoned = torch.full_like(slab, float("nan"))
    for span in spans:
        for position in range(span.context_len):
            block, offset = span.block_table[position // 16], position % 16
            poisoned[block, :, offset] = slab[block, :, offset]
    assert torch.equal(backend.attend(queries, layer_of(poisoned), backend.plan(spans)), expected)


def test_a_small_step_after_a_large_one_reuses_the_buffer() -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256)
    backend = CpuAttention(geometry, torch.float32)
    for shapes in ([(P, 0, 200)], [(D, 5, 1)], [(P, 0, 10), (D, 250, 1)][::-1]):
        spans = scattered_spans(shapes, 16, NUM_BLOCKS)
        slab, queries = _slab_and_queries(geometry, sum(span.num_queries for span in spans))
        out = backend.attend(queries, layer_of(slab), backend.plan(spans))
        torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry), rtol=1e-4, atol=1e-5)
