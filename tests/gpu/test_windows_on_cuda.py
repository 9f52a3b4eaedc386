"""Layers with windows, and models run by transformers' own classes, compute on CUDA what they compute on CPU. NOT YET RUN ON A GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pd_serve.errors import ModelError
from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.test_fallback import save_fallback_model
from tests.accuracy.tiny_models import save_tiny_model

pytestmark = pytest.mark.gpu
TOLERANCE = 0.05
"""Of the largest logit: bfloat16 against float32."""


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "phi3-window", "Olmo2", "Starcoder2"])
def test_logits_are_close_to_those_of_the_cpu_in_float32(name: str, block_size: int, tmp_path: Path) -> None:
    (save_fallback_model if name[0].isupper() else save_tiny_model)(name, tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in (1, 17, 65, 200)]
    _, expected = generate(make_runner(tmp_path, "float32"), prompts, 1, Way())
    _, logits = generate(make_runner(tmp_path, "bfloat16", block_size=block_size, device="cuda"), prompts, 1, Way(chunk=50))
    for got, wanted in zip(logits, expected, strict=True):
        assert torch.max(torch.abs(got.float().cpu() - wanted)) < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize(("name", "what"), [("Gemma2", "softcap"), ("GptOss", "sinks")])
def test_what_the_kernel_does_not_compute_is_refused_at_load(name: str, what: str, tmp_path: Path) -> None:
    save_fallback_model(name, tmp_path)
    with pytest.raises(ModelError, match=what):
        make_runner(tmp_path, "bfloat16", device="cuda")
