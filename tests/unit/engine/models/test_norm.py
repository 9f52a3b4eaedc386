from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pd_serve.engine.models.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_torchs_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.rand(96).to(dtype), (torch.randn(33, 96) * 3).to(dtype)
    before = x.clone()
    out = RMSNorm(weight, 1e-5)(x)
    torch.testing.assert_close(out, F.rms_norm(x.float(), (96,), weight.float(), 1e-5).to(dtype))
    assert torch.equal(x, before)


def test_heads_may_have_weights_of_their_own() -> None:
    torch.manual_seed(0)
    weight, x = torch.rand(3, 16), torch.randn(5, 3, 16)
    out = RMSNorm(weight, 1e-6)(x)
    for head in range(3):
        torch.testing.assert_close(out[:, head], F.rms_norm(x[:, head], (16,), weight[head], 1e-6))


@pytest.mark.parametrize("size", [64, 100, 576])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(torch.rand(size), 1e-5), torch.randn(70, size)
    whole = norm(x)
    assert all(torch.equal(norm(x[:count]), whole[:count]) for count in (1, 2, 3, 7, 33))


def test_zeros_stay_zeros() -> None:
    assert RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).eq(0).all()
