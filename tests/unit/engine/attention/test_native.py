from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pd_serve.engine.attention.base import AttentionGeometry, LayerRule
from pd_serve.engine.attention.cpu import CpuAttention
from pd_serve.engine.attention.native import NativeAttention
from pd_serve.engine.batch import Phase
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans, slab_and_queries
from tests.unit.engine.native.compiled import operators

P, D = Phase.PREFILL, Phase.DECODE
NUM_BLOCKS = 200
MIXES = {
    "one decode": [(D, 9, 1)],
    "the first token": [(D, 0, 1)],
    "decodes of several lengths": [(D, 0, 1), (D, 15, 1), (D, 16, 1), (D, 63, 1), (D, 150, 1)],
    "a whole prompt": [(P, 0, 70)],
    "all together": [(D, 3, 1), (D, 130, 1), (P, 0, 64), (P, 65, 3)],
}


def _backend(geometry: AttentionGeometry) -> NativeAttention:
    return NativeAttention(geometry, operators(geometry.head_dim, torch.float32))


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(4, 2, 16), (3, 3, 7), (7, 1, 100), (9, 1, 3)])
@pytest.mark.parametrize("window", [0, 1, 40])
def test_equals_the_definition(name: str, num_heads: int, num_kv_heads: int, block_size: int, window: int) -> None:
    geometry = AttentionGeometry(num_heads, num_kv_heads, 32, block_size, 256, windows=(window,))
    spans = scattered_spans(MIXES[name], block_size, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, sum(span.num_queries for span in spans))
    backend, rule = _backend(geometry), LayerRule(window)
    out = backend.attend(queries, layer_of(slab), backend.plan(spans), rule)
    torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry, rule), rtol=1e-4, atol=1e-5)


def test_what_lies_beyond_a_sequence_has_no_influence_and_what_lies_in_it_has() -> None:
    geometry = AttentionGeometry(4, 2, 32, 16, 256)
    spans = scattered_spans([(D, 20, 1), (P, 30, 10)], 16, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, 11)
    backend = _backend(geometry)
    expected = backend.attend(queries, layer_of(slab), backend.plan(spans))
    poisoned = torch.full_like(slab, float("nan"))
    for span in spans:
        for position in range(span.context_len):
            block, offset = span.block_table[position // 16], position % 16
            poisoned[block, :, offset] = slab[block, :, offset]
    assert torch.equal(backend.attend(queries, layer_of(poisoned), backend.plan(spans)), expected)
    poisoned[spans[0].block_table[0], 0, 3] = float("nan")
    assert backend.attend(queries, layer_of(poisoned), backend.plan(spans))[0].isnan().all()


@pytest.mark.parametrize("window", [0, 40])
def test_a_result_does_not_depend_on_company_or_order_of_heads(window: int) -> None:
    geometry = AttentionGeometry(6, 2, 32, 16, 256, windows=(window,))
    rule, backend = LayerRule(window), _backend(geometry)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, 4)
    together = scattered_spans([(D, 17, 1), (D, 130, 1), (D, 150, 1), (D, 255, 1)], 16, NUM_BLOCKS)
    expected = backend.attend(queries, layer_of(slab), backend.plan(together), rule)
    for index, span in enumerate(together):
        alone = (replace(span, first_row=0),)
        out = backend.attend(queries[index : index + 1], layer_of(slab), backend.plan(alone), rule)
        assert torch.equal(out[0], expected[index])
    spread = queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(backend.attend(spread, layer_of(slab), backend.plan(together), rule), expected)


def test_prompts_go_the_way_they_go_without_compiled_operators() -> None:
    geometry = AttentionGeometry(4, 2, 32, 16, 256)
    spans = scattered_spans([(D, 20, 1), (P, 0, 70)], 16, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, 71)
    outs = [
        backend.attend(queries, layer_of(slab), backend.plan(spans))
        for backend in (_backend(geometry), CpuAttention(geometry, torch.float32))
    ]
    assert torch.equal(outs[0][1:], outs[1][1:])
