"""Windows, softcaps and transformers' own classes keep the promise of test_invariance.py: logits depend on nothing but the sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.test_fallback import save_fallback_model
from tests.accuracy.tiny_models import save_tiny_model

WAYS = (Way(chunk=64), Way(batch=1), Way(chunk=7, batch=3, block_seed=6))
LENGTHS = (1, 8, 64, 65, 200)
CASES: list[tuple[Callable[[str, Path], PreTrainedModel], str]] = [
    *((save_tiny_model, name) for name in ("gemma3", "gemma3-softcap", "mistral-window", "phi3-window")),
    *((save_fallback_model, name) for name in ("Olmo2", "Gemma2", "Starcoder2")),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("save", "name"), CASES, ids=[name for _, name in CASES])
def test_logits_do_not_depend_on_the_way(save: Callable[[str, Path], PreTrainedModel], name: str, dtype: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    runner = make_runner(tmp_path, dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(211) for _ in range(length)] for length in LENGTHS]
    _, expected = generate(runner, prompts, 4, Way())
    for way in WAYS:
        _, logits = generate(runner, prompts, 4, way)
        assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True)), way
