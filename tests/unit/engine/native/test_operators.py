from __future__ import annotations

import pytest
import torch

from pd_serve.engine.kv_cache import open_kv_cache
from pd_serve.engine.models.glue import Glue, TorchGlue
from pd_serve.engine.models.native_glue import NativeGlue
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.rope import RopeParams
from pd_serve.engine.step_inputs import StepInputs
from pd_serve.kv.layout import KVDtype, KVLayout, KVOrder
from tests.unit.engine.native.compiled import operators

CPU = torch.device("cpu")
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 32, 6, 2
DTYPES = [torch.bfloat16, torch.float32]
BOTH = pytest.mark.parametrize("dtype", DTYPES)


def _glue(dtype: torch.dtype) -> Glue:
    return NativeGlue(operators(HEAD_DIM, dtype))


@BOTH
@pytest.mark.parametrize("size", [576, 96, 100])
@pytest.mark.parametrize("num_rows", [1, 2, 33, 700])
def test_norms_have_torchs_very_bits(num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    hidden, norm = (torch.randn(num_rows, size) * 3).to(dtype), RMSNorm(torch.rand(size).to(dtype), 1e-5)
    assert torch.equal(_glue(dtype).norm(hidden, norm), TorchGlue().norm(hidden, norm))


@BOTH
def test_norms_of_heads_have_torchs_very_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(torch.rand(NUM_HEADS, HEAD_DIM).to(dtype), 1e-6)
    ours = torch.randn(5, NUM_HEADS + 3, HEAD_DIM).to(dtype)
    torchs = ours.clone()
    _glue(dtype).norm_heads_(ours[:, :NUM_HEADS], norm)
    TorchGlue().norm_heads_(torchs[:, :NUM_HEADS], norm)
    assert torch.equal(ours, torchs)


@BOTH
@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_heads_turn_and_kv_is_written_with_torchs_very_bits(block_size: int, order: KVOrder, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = KVLayout(2, NUM_KV_HEADS, HEAD_DIM, block_size, 64 // block_size, KVDtype(str(dtype).removeprefix("torch.")), order=order)
    rotary = RotaryTable(RopeParams(theta=1e4), HEAD_DIM, 256, dtype, CPU)
    slots = torch.randperm(layout.num_blocks * block_size)[:20]
    inputs = StepInputs(20, 20, slots, torch.randint(256, (20,)), slots, slots, (), ())
    heads = torch.randn(20, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).to(dtype)
    pools, turned = [], []
    for glue in (_glue(dtype), TorchGlue()):
        cache, own = open_kv_cache(layout, None, CPU, dtype), heads.clone()
        glue.placement(inputs, rotary, cache, NUM_HEADS)(1, own)
        pools.append(cache.region)
        turned.append(own)
    assert torch.equal(turned[0], turned[1])
    assert torch.equal(pools[0], pools[1])


@BOTH
def test_a_rows_norm_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    glue, norm, x = _glue(dtype), RMSNorm(torch.rand(96).to(dtype), 1e-5), torch.randn(2000, 96).to(dtype)
    normed = glue.norm(x, norm)
    assert all(torch.equal(glue.norm(x[:count].contiguous(), norm), normed[:count]) for count in (1, 2, 3, 100))


@BOTH
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.full((1, 32), float("nan")).to(dtype)
    assert _glue(dtype).norm(x, RMSNorm(torch.ones(32).to(dtype), 1e-5)).isnan().all()
