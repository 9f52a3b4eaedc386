"""A pool on a GPU is packed to the very bytes that one in host memory is. NOT YET RUN ON A GPU."""

from __future__ import annotations

import pytest
import torch

from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.kv_cache import open_kv_cache
from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from workers.prefill.packer import TorchPacker

pytestmark = pytest.mark.gpu
BLOCKS, TARGET_BLOCKS, NUM_TOKENS, SLOT = (7, 2, 9, 4), (1, 0), 57, 4096


def packed(src: KVLayout, dst: KVLayout, device: torch.device) -> list[bytes]:
    """By packing, layer by layer; packed beside a step that computes on the device."""
    cache = open_kv_cache(src, None, device, torch_dtype("bfloat16"), SLOT)
    generator = torch.Generator().manual_seed(3)
    slots = torch.tensor([BLOCKS[token // src.block_size] * src.block_size + token % src.block_size for token in range(NUM_TOKENS)])
    rows = cache.rows(slots.to(device))
    for layer in range(src.num_layers):
        heads = torch.randn(NUM_TOKENS, 2 * src.num_kv_heads, src.head_dim, generator=generator).to(torch.bfloat16)
        cache.write(layer, rows, heads.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    packer = TorchPacker(cache, cache.region)
    results = []
    for packing in plan_packings(src, dst, HeadSlice(0, 0, src.num_kv_heads), BLOCKS, TARGET_BLOCKS, 3, NUM_TOKENS, SLOT):
        for layer in range(src.num_layers):
            packer.pack(layer, packing, src.pool_nbytes)
            results.append(bytes(cache.region[src.pool_nbytes : src.pool_nbytes + packing.nbytes].cpu().numpy()))
    return results


@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("dtype", list(KVDtype))
@pytest.mark.parametrize("stored", [KVDtype.BFLOAT16, KVDtype.FP8_E4M3])
def test_the_packed_bytes_are_those_of_the_cpu(order: KVOrder, dtype: KVDtype, stored: KVDtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    src = KVLayout(2, 2, 16, 16, 12, stored, 2, KVOrder.TOKEN_MAJOR)
    dst = KVLayout(2, 2, 16, 32, 4, dtype, 2, order)
    assert packed(src, dst, torch.device("cuda")) == packed(src, dst, torch.device("cpu"))
