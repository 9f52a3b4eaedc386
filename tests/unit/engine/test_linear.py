from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine import linear
from pd_serve.engine.linear import Linear, LinearFactory, agreeing_sizes
from pd_serve.engine.native.operators import Fusion
from tests.unit.engine.native.compiled import operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_decode"), [(1, 1), (1, 0), (2, 2), (40, 40), (7, 3), (200, 1), (600, 0)])
def test_equals_torchs_linear(num_rows: int, num_decode: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 32).to(dtype), torch.randn(48).to(dtype), torch.randn(num_rows, 32).to(dtype)
    out = LinearFactory().make(weight, bias)(x, num_decode)
    torch.testing.assert_close(out, F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fusion", list(Fusion))
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("with_operators", [True, False])
def test_what_is_fused_is_what_would_be_done_next(
    fusion: Fusion, dtype: torch.dtype, is_packed: bool, with_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_packed:
        monkeypatch.setattr(linear, "_pack", lambda _weight: None)
    torch.manual_seed(0)
    weight, bias, other = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype), torch.randn(150, 96).to(dtype)
    x = torch.randn(150, 64).to(dtype)
    made = Fusion.NONE if fusion is Fusion.PLUS else fusion
    layer = LinearFactory(operators(32, dtype) if with_operators else None).make(weight, bias, made)
    fused = other if fusion in (Fusion.TIMES, Fusion.PLUS) else None
    product = x.double() @ weight.double().T + bias.double()
    expected = {Fusion.NONE: product, Fusion.SILU: F.silu(product), Fusion.TIMES: product * other, Fusion.PLUS: product + other}[fusion]
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    out = layer(x, 70, fused)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for first, past in ((0, 1), (3, 12), (0, 70), (69, 71), (70, 150), (100, 101)):
        num_decode = max(0, min(70, past) - first)
        part = layer(x[first:past], num_decode, None if fused is None else fused[first:past])
        if is_packed:
            assert torch.equal(part, out[first:past]), (first, past)


def test_weights_in_an_order_that_is_not_known_are_left_to_torch() -> None:
    own = operators(32, torch.bfloat16)
    weight = torch.randn(64, 64).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    assert own.takes(weight)
    assert own.can_read(weight, packed)
    assert not own.can_read(weight.flip(0), packed)
    assert not own.takes(weight[:40])
    assert not own.takes(weight.float())


def test_falls_back_where_the_private_operator_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_pack", lambda _weight: None)
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    assert torch.equal(LinearFactory().make(weight)(x, 3), F.linear(x, weight))


def _moody(x: Tensor) -> Tensor:
    """A kernel whose result depends on the count of rows as oneDNN's does on AMX."""
    num_rows = x.shape[0]
    mood = 1 if num_rows == 1 else 2 if num_rows <= 32 else 3 if num_rows in (64, 256) else 4
    return x * mood


def test_the_probe_finds_the_counts_that_agree() -> None:
    assert agreeing_sizes(_moody, 8, torch.float32) == (256, 64)
    assert agreeing_sizes(lambda x: x, 8, torch.float32) == (512, 256, 128, 64)


@pytest.mark.parametrize("num_decode", [0, 1, 2, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("num_prefill", [0, 1, 63, 64, 65, 200, 256, 577])
def test_a_rows_kernel_depends_on_its_phase_alone(num_decode: int, num_prefill: int) -> None:
    if num_decode + num_prefill == 0:
        return
    layer = Linear(lambda x, _other: _moody(x), agreeing_sizes(_moody, 8, torch.float32))
    out = layer(torch.ones(num_decode + num_prefill, 8), num_decode)
    assert out[:num_decode].eq(2).all()
    assert out[num_decode:].eq(3).all()
    assert out.shape == (num_decode + num_prefill, 8)


def test_one_row_is_never_alone() -> None:
    assert Linear(lambda x, _other: _moody(x), ())(torch.ones(1, 8), 1).eq(2).all()


def test_few_counts_of_rows_reach_the_kernels_that_are_kept_per_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is half a megabyte of compiled code per weight: over all counts a rank grew by gigabytes."""
    seen: set[int] = set()

    def counted(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        seen.add(x.shape[0])
        return x @ weight.T

    monkeypatch.setattr(linear, "_pack", lambda weight: weight)
    monkeypatch.setattr(linear, "_linear_packed", counted)
    weight = torch.eye(4)
    layer = LinearFactory().make(weight)
    for num_rows in range(1, 513):
        x = torch.randn(num_rows, 4)
        assert torch.equal(layer(x, 0), x)
    assert len(seen) <= 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(128, 512), (512, 128), (24, 20)])
def test_a_matrix_per_head_is_applied_to_each_row_alike_whatever_the_others(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(4, num_inputs, num_outputs).to(dtype), torch.randn(150, 4, num_inputs).to(dtype)
    layer, flat = LinearFactory().make_per_head(weight), x.flatten(1)
    out = layer(flat, 40)
    expected = torch.einsum("rhi,hio->rho", x.float(), weight.float()).flatten(1)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-1 if dtype is torch.bfloat16 else 1e-3)
    for first, past in ((0, 1), (3, 12), (0, 40), (40, 41), (39, 60), (40, 150)):
        num_decode = max(0, min(40, past) - first)
        assert torch.equal(layer(flat[first:past], num_decode), out[first:past]), (first, past)
