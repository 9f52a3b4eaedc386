"""Models with experts and with latent attention: tokens and logits as transformers computes them, in float32, however they are computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.tiny_sparse_models import SPARSE_MODELS, save_sparse_model

NUM_TOKENS = 32
LENGTHS = (1, 2, 17, 64, 65, 130)
WAYS = ((16, Way(chunk=50, batch=6, block_seed=2)), (8, Way(chunk=7, batch=2, block_seed=3)), (64, Way()))


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 211) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("name", sorted(SPARSE_MODELS))
def test_tokens_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_sparse_model(name, tmp_path)
    runs = [generate(make_runner(tmp_path, "float32", block_size=size), prompts(), NUM_TOKENS, way) for size, way in WAYS]
    first = runs[0][0]
    assert all(tokens == first for tokens, _ in runs)
    expected = [_logits(model, prompt, tokens) for prompt, tokens in zip(prompts(), first, strict=True)]
    # Each token is the best of those that transformers would choose from after the tokens before it: its own greedy ones.
    assert [logits.argmax(-1).tolist() for logits in expected] == first
    for _, logits in runs:
        for mine, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@torch.inference_mode()
def _logits(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> Tensor:
    """[NUM_TOKENS, vocab_size]: what each of `tokens` was chosen from."""
    logits: Tensor = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]
