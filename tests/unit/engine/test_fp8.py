from __future__ import annotations

import torch

from pd_serve.engine.fp8 import dequantize_into, quantize, scale_values


def restored(values: torch.Tensor) -> torch.Tensor:
    elements, scales = quantize(values)
    out = torch.empty(values.shape, dtype=torch.float32)
    dequantize_into(elements, scales, out)
    return out


def test_error_is_a_sixteenth_of_each_value_or_of_the_largest_over_many_binades() -> None:
    values = torch.randn(1000, 64) * torch.logspace(-20, 20, 1000)[:, None]
    largest = values.abs().amax(-1, keepdim=True)
    # Half a unit of 3 fraction bits; below the normal range half of the least step, 2^-10 of 224 at the worst.
    bound = torch.maximum(values.abs() / 16, largest * 2**-10 / 224)
    assert ((restored(values) - values).abs() <= bound * 1.0001).all()


def test_what_was_stored_is_stored_again_without_a_change() -> None:
    once = restored(torch.randn(2000, 32) * torch.rand(2000, 1).exp())
    assert torch.equal(restored(once), once)


def test_zeros_powers_of_two_and_the_largest_are_exact() -> None:
    values = torch.tensor([[0.0, 0.0], [448.0, -224.0], [2.0**-60, 2.0**-61], [2.0**60, 0.0]])
    assert torch.equal(restored(values), values)


def test_nothing_that_is_no_number_becomes_one() -> None:
    assert restored(torch.tensor([[1.0, float("nan")]])).isnan().any()
    assert not restored(torch.tensor([[1.0, float("inf")]])).isfinite().all()


def test_scales_are_powers_of_two() -> None:
    assert scale_values(torch.tensor([1, 127, 130, 254], dtype=torch.uint8)).tolist() == [2.0**-126, 1.0, 8.0, 2.0**127]


def test_bfloat16_holds_every_stored_value() -> None:
    elements, scales = quantize(torch.randn(500, 64))
    wide, narrow = torch.empty(500, 64), torch.empty(500, 64, dtype=torch.bfloat16)
    dequantize_into(elements, scales, wide)
    dequantize_into(elements, scales, narrow)
    assert torch.equal(narrow.float(), wide)
