"""Whatever the two layouts: what is read at the target is what was read at the source, converted once."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_serve.engine.dtypes import torch_dtype
from pd_serve.engine.fp8 import dequantize_into, quantize
from pd_serve.engine.kv_cache import PagedCache, open_kv_cache
from pd_serve.engine.kv_pack import pack, source_rows
from pd_serve.kv.conversion import HeadSlice, plan_packings
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder

CPU = torch.device("cpu")
ENGINE_DTYPES = [KVDtype.FLOAT32, KVDtype.BFLOAT16, KVDtype.FLOAT16]


def opened(layout: KVLayout, engine: KVDtype) -> tuple[PagedCache, bytearray]:
    memory = bytearray(layout.pool_nbytes)
    return open_kv_cache(layout, memoryview(memory), CPU, torch_dtype(engine.value)), memory


def slots_of(blocks: list[int], block_size: int, start: int, end: int) -> torch.Tensor:
    return torch.tensor([blocks[token // block_size] * block_size + token % block_size for token in range(start, end)])


def as_stored(values: torch.Tensor, dtype: KVDtype) -> torch.Tensor:
    if not dtype.has_scales:
        return values.to(torch_dtype(dtype.value)).float()
    out = torch.empty(values.shape)
    dequantize_into(*quantize(values), out)
    return out


@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_a_packed_transfer_gives_the_target_what_the_source_has(rng: random.Random) -> None:
    engines = rng.choice(ENGINE_DTYPES), rng.choice(ENGINE_DTYPES)
    dtypes = [rng.choice([engine, KVDtype.FP8_E4M3]) for engine in engines]
    orders = rng.choice(list(KVOrder)), rng.choice(list(KVOrder))
    num_planes = rng.choice([1, 2])
    num_heads = rng.randint(1, 3), rng.randint(1, 3)
    count = rng.randint(1, min(num_heads))
    heads = HeadSlice(rng.randint(0, num_heads[0] - count), rng.randint(0, num_heads[1] - count), count)
    src, dst = (KVLayout(2, num_heads[side], 8, rng.choice([1, 3, 8, 16]), 30, dtypes[side], num_planes, orders[side]) for side in (0, 1))
    end = rng.randint(1, 24)
    start = rng.randint(0, end - 1)
    src_blocks = rng.sample(range(30), src.num_blocks_for(end))
    dst_blocks = rng.sample(range(30), dst.num_blocks_for(end))
    source, _ = opened(src, engines[0])
    target, memory = opened(dst, engines[1])
    torch.manual_seed(rng.randrange(1 << 30))
    written = torch.randn(end, num_planes * num_heads[0], 8).to(torch_dtype(engines[0].value))
    src_slots, dst_slots = slots_of(src_blocks, src.block_size, start, end), slots_of(dst_blocks, dst.block_size, start, end)
    for layer in (0, 1):
        source.write(layer, source.rows(slots_of(src_blocks, src.block_size, 0, end)), written * (layer + 1))
        for packing in plan_packings(src, dst, heads, src_blocks, dst_blocks, start, end, rng.choice([64, 700, 1 << 20])):
            out = torch.empty(packing.nbytes, dtype=torch.uint8)
            pack(source, layer, packing, source_rows(source, packing, CPU), out)
            packed = bytes(out.numpy())
            for local, remote, nbytes in packing.ranges:
                at = remote + layer * dst.layer_nbytes
                memory[at : at + nbytes] = packed[local : local + nbytes]
    for layer in (0, 1):
        sent = source.read(layer, source.rows(src_slots))[:, :, heads.src.start : heads.src.stop].float()
        got = target.read(layer, target.rows(dst_slots))[:, :, heads.dst.start : heads.dst.stop].float()
        assert torch.equal(got, as_stored(sent, dst.dtype))
        # Gathering for attention sees the same.
        planes = torch.tensor([block * num_planes + plane for block in dst_blocks for plane in range(num_planes)])
        gathered = torch.empty(len(planes), dst.block_size * dst.num_kv_heads * 8, dtype=torch_dtype(engines[1].value))
        target.layer(layer).gather(planes, gathered)
        tokens = gathered.view(len(dst_blocks), num_planes, dst.block_size, dst.num_kv_heads, 8).transpose(1, 2).flatten(0, 1)
        seen = tokens[start:end, :, heads.dst.start : heads.dst.stop].transpose(0, 1).float()
        assert torch.equal(seen, got.to(gathered.dtype).float())


@pytest.mark.parametrize("order", list(KVOrder))
def test_fp8_kept_as_fp8_keeps_its_values(order: KVOrder) -> None:
    src = KVLayout(1, 2, 16, 4, 4, KVDtype.FP8_E4M3)
    dst = KVLayout(1, 2, 16, 8, 4, KVDtype.FP8_E4M3, 2, order)
    source, _ = opened(src, KVDtype.BFLOAT16)
    slots = slots_of([2, 0, 3], 4, 0, 11)
    source.write(0, source.rows(slots), torch.randn(11, 4, 16, dtype=torch.bfloat16))
    (packing,) = plan_packings(src, dst, HeadSlice(0, 0, 2), [2, 0, 3], [1, 2], 0, 11, 1 << 20)
    out = torch.empty(packing.nbytes, dtype=torch.uint8)
    pack(source, 0, packing, source_rows(source, packing, CPU), out)
    target, memory = opened(dst, KVDtype.FLOAT32)
    for local, remote, nbytes in packing.ranges:
        memory[remote : remote + nbytes] = bytes(out[local : local + nbytes].numpy())
    assert torch.equal(target.read(0, target.rows(slots_of([1, 2], 8, 0, 11))), source.read(0, source.rows(slots)))
