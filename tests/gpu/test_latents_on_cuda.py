"""Latent attention and experts on CUDA are close to the CPU's in float32. NOT YET RUN ON A GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.test_sparse_invariance import DEEPSEEK, QWEN3_MOE

pytestmark = pytest.mark.gpu
PROMPTS = [[(37 * offset + 11 * length) % 500 + 3 for offset in range(length)] for length in (1, 16, 17, 130, 300)]


@pytest.mark.parametrize(("config", "dtype"), [(DEEPSEEK, "float32"), (DEEPSEEK, "bfloat16"), (QWEN3_MOE, "bfloat16")])
@pytest.mark.parametrize("chunk", [50, 10**6])
def test_logits_are_close_to_those_of_the_cpu_in_float32(config: dict[str, Any], dtype: str, chunk: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, expected = generate(make_runner(tmp_path, "float32", load_format="random"), PROMPTS, 1, Way())
    runner = make_runner(tmp_path, dtype, block_size=64, load_format="random", device="cuda")
    _, logits = generate(runner, PROMPTS, 1, Way(chunk=chunk, block_seed=1))
    tolerance = (1e-3 if dtype == "float32" else 0.1) * max(float(wanted.abs().max()) for wanted in expected)
    for got, wanted in zip(logits, expected, strict=True):
        assert torch.max(torch.abs(got.float().cpu() - wanted)) < tolerance
