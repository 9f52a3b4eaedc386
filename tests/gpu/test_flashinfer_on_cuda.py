"""FlashInfer's MLA kernels compute what plain torch products over latents do. NOT YET RUN ON A GPU. Needs the extra `flashinfer`."""

from __future__ import annotations

import pytest
import torch

from pd_serve.engine.attention.base import AttentionGeometry
from pd_serve.engine.attention.flashinfer_mla import FlashInferLatentAttention, open_kernels
from pd_serve.engine.attention.mla import LatentAttention
from pd_serve.kv.layout import KVDtype, KVLayout
from tests.unit.engine.attention.reference import scattered_spans
from tests.unit.engine.attention.test_cpu import MIXES

pytestmark = pytest.mark.gpu
NUM_BLOCKS, RANK, ROTARY = 200, 512, 64


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("name", sorted(MIXES))
def test_it_equals_plain_torch(name: str, num_heads: int, block_size: int) -> None:
    pytest.importorskip("flashinfer", reason="pip install 'pd-serve[flashinfer]'")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    from pd_serve.engine.kv_cache import open_kv_cache

    device, dtype = torch.device("cuda"), torch.bfloat16
    geometry = AttentionGeometry(num_heads, 1, RANK + ROTARY, block_size, 2048, query_scale=0.1, num_planes=1, latent_rank=RANK)
    cache = open_kv_cache(KVLayout(1, 1, RANK + ROTARY, block_size, NUM_BLOCKS, KVDtype.BFLOAT16, 1), None, device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    cache.layer(0).slab.normal_(generator=generator)
    spans = scattered_spans(MIXES[name], block_size, NUM_BLOCKS)
    num_rows = sum(span.num_queries for span in spans)
    queries = torch.randn(num_rows, num_heads, RANK + ROTARY, device=device, generator=generator).to(dtype)
    outs = []
    for attention in (FlashInferLatentAttention(geometry, dtype, open_kernels(device)), LatentAttention(geometry, dtype, device)):
        out = attention.attend(queries, cache.layer(0), attention.plan(spans))
        outs.append(out.view(num_rows, num_heads, -1)[..., :RANK].float())
    torch.testing.assert_close(outs[0], outs[1], rtol=0.03, atol=0.03)
