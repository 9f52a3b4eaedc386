"""The real Gemma 3 270M: the engine's tokens are those of transformers, beyond its window of 512 tokens too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pd_serve.errors import ModelError
from pd_serve.model_store import resolve_model
from tests.accuracy.driver import Way, generate, make_runner

NUM_TOKENS = 24
STORY = "The old man walked to the sea every morning, and every morning the sea said something else to him. " * 30


@pytest.mark.slow
def test_tokens_are_those_of_transformers_beyond_the_window() -> None:
    """Converts the checkpoint on first use (about a minute)."""
    try:
        folder: Path = resolve_model("demo-gemma3")
    except ModelError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in ("The capital of France is", "def fibonacci(n):", STORY)]
    assert len(prompts[-1]) > 512
    tokens, _ = generate(make_runner(folder, "float32", num_blocks=96), prompts, NUM_TOKENS, Way(chunk=300, batch=3, block_seed=1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, found in zip(prompts, tokens, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert found == out[0, len(prompt) :].tolist()
