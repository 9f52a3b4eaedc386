"""Models from published peaks: each coefficient against the same arithmetic by hand."""

from __future__ import annotations

import pytest

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import accelerator
from pd_serve.plan.modelled import Assumed, modelled
from pd_serve.plan.models import model_shape

LLAMA = model_shape("Llama-3.1-8B")
H100 = accelerator("H100")


def test_prefill_is_arithmetic_and_decode_is_memory() -> None:
    model = modelled(LLAMA, H100, 1, 0.5)
    assert model.prefill_s([(2048, 0)]) == pytest.approx(0.001 + LLAMA.prompt_flop(2048) / (0.5 * 989e12), rel=0.01)
    assert model.decode_s(1, 0) == pytest.approx(0.001 + 2 * LLAMA.num_params / (0.5 * 3.35e12), rel=0.01)
    assert model.decode_s(64, 64 * 2000) - model.decode_s(64, 0) == pytest.approx(64 * 2000 * 131_072 / (0.5 * 3.35e12))
    assert model.kv_bytes_per_token == 131_072
    assert model.name == "Llama-3.1-8B, H100 x1 (published peaks at 50 %)"


def test_ranks_share_weights_arithmetic_and_kv() -> None:
    one, four = modelled(LLAMA, H100, 1, 0.5), modelled(LLAMA, H100, 4, 0.5)
    assert four.num_gpus == 4
    assert four.prefill[1] == pytest.approx(one.prefill[1] / 4)
    assert four.decode[1] == pytest.approx(one.decode[1] / 4)
    assert four.num_kv_tokens > 4 * one.num_kv_tokens
    assert four.kv_bytes_per_token == one.kv_bytes_per_token


def test_latents_are_held_and_read_by_every_rank() -> None:
    shape = model_shape("DeepSeek-V3")
    assumed = Assumed(weight_nbytes=1.0)
    eight, sixteen = modelled(shape, accelerator("H200"), 8, 0.4, assumed), modelled(shape, accelerator("H200"), 16, 0.4, assumed)
    assert sixteen.decode[1] == pytest.approx(eight.decode[1])
    assert sixteen.kv_bytes_per_token == 2 * eight.kv_bytes_per_token


def test_windows_are_linear_in_a_prompt_and_constant_in_a_sequence() -> None:
    whole, windowed = model_shape("Mistral-7B-v0.3"), model_shape("Mistral-7B-v0.1")
    plain, short = modelled(whole, H100, 1, 0.5), modelled(windowed, H100, 1, 0.5)
    assert short.prefill[2] == short.decode[1] == 0.0
    far = 32_768
    assert short.decode_s(1, far) < plain.decode_s(1, far)
    assert short.prefill_s([(far, 0)]) == pytest.approx(0.001 + windowed.prompt_flop(far) / (0.5 * 989e12), rel=0.03)


def test_fp8_halves_what_a_token_weighs() -> None:
    assert modelled(LLAMA, H100, 1, 0.5, Assumed(kv_dtype=KVDtype.FP8_E4M3)).kv_bytes_per_token == pytest.approx(131_072 / 2, rel=0.05)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(PlanError, match="does not fit on 1 x H100: 141 GB"):
        modelled(model_shape("Llama-3.1-70B"), H100, 1, 0.5)
    with pytest.raises(PlanError, match="efficiency"):
        modelled(LLAMA, H100, 1, 1.5)
