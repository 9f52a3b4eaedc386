from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pd_serve.engine.attention.base import AttentionGeometry, LayerRule
from pd_serve.engine.attention.cpu import CpuAttention
from pd_serve.engine.batch import Phase
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans, slab_and_queries

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


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(4, 2, 16), (3, 3, 7), (6, 1, 100)])
def test_equals_the_definition(name: str, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    geometry = AttentionGeometry(num_heads, num_kv_heads, 8, block_size, 256)
    spans = scattered_spans(MIXES[name], block_size, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, sum(span.num_queries for span in spans))
    backend = CpuAttention(geometry, torch.float32)
    out = backend.attend(queries, layer_of(slab), backend.plan(spans))
    torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry), rtol=1e-4, atol=1e-5)


def test_what_lies_beyond_a_sequence_has_no_influence() -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256)
    spans = scattered_spans([(D, 20, 1), (P, 30, 10)], 16, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, 11)
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
        slab, queries = slab_and_queries(geometry, NUM_BLOCKS, sum(span.num_queries for span in spans))
        out = backend.attend(queries, layer_of(slab), backend.plan(spans))
        torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize("window", [1, 5, 64, 65, 100])
def test_a_window_hides_older_keys(name: str, window: int) -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256, windows=(0, window))
    spans = scattered_spans(MIXES[name], 16, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, sum(span.num_queries for span in spans))
    backend = CpuAttention(geometry, torch.float32)
    plan = backend.plan(spans)
    for rule in (LayerRule(window), LayerRule()):
        out = backend.attend(queries, layer_of(slab), plan, rule)
        torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry, rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (0.0, True), (2.0, True)])
def test_scores_are_capped_and_sinks_take_their_share(name: str, softcap: float, has_sinks: bool) -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256, query_scale=0.7, softcap=softcap, windows=(0, 70), has_sinks=has_sinks)
    spans = scattered_spans(MIXES[name], 16, NUM_BLOCKS)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, sum(span.num_queries for span in spans))
    backend = CpuAttention(geometry, torch.float32)
    plan = backend.plan(spans)
    for window in geometry.windows:
        rule = LayerRule(window, torch.tensor([0.5, -1.0, 2.0, 0.0]) if has_sinks else None)
        out = backend.attend(queries, layer_of(slab), plan, rule)
        torch.testing.assert_close(out.double(), attend(queries, slab, spans, geometry, rule), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_windows_result_does_not_depend_on_company_or_chunk(softcap: float) -> None:
    geometry = AttentionGeometry(4, 2, 8, 16, 256, softcap=softcap, windows=(40,))
    rule, backend = LayerRule(40), CpuAttention(geometry, torch.float32)
    slab, queries = slab_and_queries(geometry, NUM_BLOCKS, 133)
    together = scattered_spans([(D, 130, 1), (D, 150, 1), (P, 0, 131)], 16, NUM_BLOCKS)
    expected = backend.attend(queries, layer_of(slab), backend.plan(together), rule)
    for index, first, count in ((0, 0, 1), (1, 0, 1), (2, 0, 131), (2, 70, 7), (2, 130, 1)):
        span = together[index]
        alone = (replace(span, first_row=0, start=span.start + first, num_queries=count),)
        rows = queries[span.first_row + first : span.first_row + first + count]
        out = backend.attend(rows, layer_of(slab), backend.plan(alone), rule)
        assert torch.equal(out, expected[span.first_row + first : span.first_row + first + count])
