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
    expected = [_greedy(model, prompt) for prompt in prompts()]
    for block_size, way in WAYS:
        tokens, logits = generate(make_runner(tmp_path, "float32", block_size=block_size), prompts(), NUM_TOKENS, way)
        assert tokens == [tokens for tokens, _ in expected], (block_size, way)
        for mine, (_, theirs) in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    """NUM_TOKENS tokens, and the logits [NUM_TOKENS, vocab_size] that they were chosen by."""
    token_ids = list(prompt)
    logits = []
    for _ in range(NUM_TOKENS):
        logits.append(model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1])
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :], torch.stack(logits)
