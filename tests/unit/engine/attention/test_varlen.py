"""The CUDA path's bookkeeping, on CPU: its kernel is replaced by the definition, fed with exactly the arguments the real one gets."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pd_serve.engine.attention.base import AttentionGeometry, LayerRule, QuerySpan
from pd_serve.engine.attention.varlen import VarlenAttention, VarlenBuffers
from pd_serve.engine.batch import Phase
from pd_serve.errors import ModelError
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans

P, D = Phase.PREFILL, Phase.DECODE
GEOMETRY = AttentionGeometry(4, 2, 8, 16, 256)
SHAPES = [(D, 3, 1), (D, 63, 1), (P, 0, 20), (P, 17, 5)]


def _definition(query: Tensor, key: Tensor, value: Tensor, *positional: object, **options: object) -> Tensor:
    inspect.signature(varlen_attn).bind(query, key, value, *positional, **options)
    cumulative, _, max_queries, max_context = positional
    lens, table = options["seqused_k"], options["block_table"]
    assert isinstance(cumulative, Tensor)
    assert isinstance(lens, Tensor)
    assert isinstance(table, Tensor)
    assert {cumulative.dtype, lens.dtype, table.dtype} == {torch.int32}
    left, right = cast("tuple[int, int]", options["window_size"])
    assert right == 0
    edges = cumulative.tolist()
    spans = [
        QuerySpan(P, first, int(length) - (past - first), past - first, tuple(row))
        for first, past, length, row in zip(edges, edges[1:], lens, table.tolist(), strict=False)
    ]
    assert max_queries == max(span.num_queries for span in spans)
    assert max_context == max(span.context_len for span in spans)
    return attend(query, torch.stack((key, value), 1), spans, GEOMETRY, LayerRule(left + 1)).view(query.shape)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_calls_cover_every_row_of_each_phase(count: int) -> None:
    torch.manual_seed(0)
    spans = scattered_spans(SHAPES[:count], 16, 40)
    slab, queries = torch.randn(40, 2, 16, 2, 8), torch.randn(sum(span.num_queries for span in spans), 4, 8)
    backend = VarlenAttention(GEOMETRY, torch.device("cpu"), _definition)
    plan = backend.plan(spans)
    assert len(plan.calls) == len({span.phase for span in spans})
    torch.testing.assert_close(backend.attend(queries, layer_of(slab), plan), attend(queries, slab, spans, GEOMETRY))


def test_torchs_kernel_takes_these_shapes() -> None:
    """Its fake (meta) implementation, since there is no CPU kernel."""
    from torch._subclasses import FakeTensorMode

    spans = scattered_spans(SHAPES, 16, 40)
    with FakeTensorMode(allow_non_fake_inputs=True):
        backend = VarlenAttention(GEOMETRY, torch.device("cpu"), varlen_attn)
        queries, slab = torch.empty(27, 4, 8, dtype=torch.bfloat16), torch.empty(40, 2, 16, 2, 8, dtype=torch.bfloat16)
        assert backend.attend(queries, layer_of(slab), backend.plan(spans)).shape == (27, 32)


def test_a_window_counts_the_querys_own_key() -> None:
    """The kernel's window is of keys before the query's own."""
    torch.manual_seed(0)
    spans, rule = scattered_spans(SHAPES, 16, 40), LayerRule(6)
    slab, queries = torch.randn(40, 2, 16, 2, 8), torch.randn(27, 4, 8)
    backend = VarlenAttention(GEOMETRY, torch.device("cpu"), _definition)
    out = backend.attend(queries, layer_of(slab), backend.plan(spans), rule)
    torch.testing.assert_close(out, attend(queries, slab, spans, GEOMETRY, rule))


@pytest.mark.parametrize(("changes", "name"), [({"softcap": 50.0}, "softcap"), ({"has_sinks": True}, "sinks")])
def test_what_the_kernel_does_not_compute_is_refused_by_name(changes: dict[str, float], name: str) -> None:
    with pytest.raises(ModelError, match=name):
        VarlenAttention(replace(GEOMETRY, **changes), torch.device("cpu"), varlen_attn)


def test_sinks_that_a_layer_brings_are_refused_as_well() -> None:
    spans = scattered_spans(SHAPES, 16, 40)
    backend = VarlenAttention(GEOMETRY, torch.device("cpu"), _definition)
    with pytest.raises(ModelError, match="sinks"):
        backend.attend(torch.zeros(27, 4, 8), layer_of(torch.zeros(40, 2, 16, 2, 8)), backend.plan(spans), LayerRule(sinks=torch.zeros(4)))


def test_torchs_kernel_takes_the_shapes_of_captured_steps() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.nn.attention.varlen import varlen_attn_out

    spans = scattered_spans([(D, 3, 1), (D, 63, 1)], 16, 40)
    with FakeTensorMode(allow_non_fake_inputs=True):
        backend = VarlenAttention(GEOMETRY, torch.device("cpu"), varlen_attn, varlen_attn_out)
        buffers = VarlenBuffers(16, 4, 256, torch.device("cpu"))
        queries, slab = torch.empty(4, 4, 8, dtype=torch.bfloat16), torch.empty(40, 2, 16, 2, 8, dtype=torch.bfloat16)
        assert backend.attend(queries, layer_of(slab), buffers.plan(4)).shape == (4, 32)
    real = VarlenBuffers(16, 4, 256, torch.device("cpu"))
    real.fill(spans, 4, 39)
    (call,) = real.plan(4).calls
    assert call.context_lens.tolist() == [4, 64, 1, 1]
    assert call.block_table.shape == (4, 16)
    assert [row[:4] for row in call.block_table.tolist()] == [
        [spans[0].block_table[0], 0, 0, 0],
        list(spans[1].block_table),
        [39, 39, 39, 39],
        [39, 39, 39, 39],
    ]
    assert call.cumulative_queries.tolist() == [0, 1, 2, 3, 4]
