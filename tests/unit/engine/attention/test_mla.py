"""Latents, which are keys and values at once: both attentions that know them, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pd_serve.engine.attention.base import AttentionBackend, AttentionGeometry
from pd_serve.engine.attention.cpu import CpuAttention
from pd_serve.engine.attention.mla import LatentAttention
from pd_serve.engine.attention.registry import attention_for
from tests.unit.engine.attention.reference import attend, layer_of, scattered_spans
from tests.unit.engine.attention.test_cpu import MIXES, D, P

NUM_BLOCKS = 200
Maker = Callable[[AttentionGeometry], AttentionBackend[Any]]
BACKENDS: dict[str, Maker] = {
    "cpu": lambda geometry: CpuAttention(geometry, torch.float32),
    "plain": lambda geometry: LatentAttention(geometry, torch.float32, torch.device("cpu")),
}


def _geometry(block_size: int) -> AttentionGeometry:
    return AttentionGeometry(4, 1, 24, block_size, 256, query_scale=0.3, num_planes=1)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("name", sorted(MIXES))
@pytest.mark.parametrize("block_size", [7, 16, 100])
def test_equals_the_definition(backend: str, name: str, block_size: int) -> None:
    torch.manual_seed(0)
    geometry = _geometry(block_size)
    spans = scattered_spans(MIXES[name], block_size, NUM_BLOCKS)
    slab = torch.randn(NUM_BLOCKS, 1, block_size, 1, 24)
    queries = torch.randn(sum(span.num_queries for span in spans), 4, 24)
    poisoned = torch.full_like(slab, float("nan"))
    for span in spans:
        for position in range(span.context_len):
            block, offset = span.block_table[position // block_size], position % block_size
            poisoned[block, :, offset] = slab[block, :, offset]
    attention = BACKENDS[backend](geometry)
    out = attention.attend(queries, layer_of(poisoned), attention.plan(spans))
    expected = attend(queries, slab.expand(-1, 2, -1, -1, -1), spans, geometry)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_cuda_gets_the_plain_one() -> None:
    assert isinstance(attention_for(_geometry(16), torch.bfloat16, torch.device("cuda")), LatentAttention)


def test_a_prompt_in_chunks_is_as_the_whole() -> None:
    torch.manual_seed(1)
    slab, queries = torch.randn(NUM_BLOCKS, 1, 16, 1, 24), torch.randn(150, 4, 24)
    attention = BACKENDS["plain"](_geometry(16))
    (whole,) = scattered_spans([(P, 0, 150)], 16, NUM_BLOCKS)
    expected = attention.attend(queries, layer_of(slab), attention.plan([whole]))
    for start, past in ((0, 7), (7, 64), (64, 130), (130, 150)):
        chunk = type(whole)(P, 0, start, past - start, whole.block_table)
        out = attention.attend(queries[start:past], layer_of(slab), attention.plan([chunk]))
        torch.testing.assert_close(out, expected[start:past])
    last = type(whole)(D, 0, 149, 1, whole.block_table)
    torch.testing.assert_close(attention.attend(queries[149:], layer_of(slab), attention.plan([last])), expected[149:])
