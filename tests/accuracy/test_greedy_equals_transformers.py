"""The engine's greedy tokens are those of transformers' generate, token by token, in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.accuracy.driver import Way, generate, make_runner
from tests.accuracy.tiny_models import TINY_MODELS, save_tiny_model

NUM_TOKENS = 64
NUM_DEMO_TOKENS = 32
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "What is 12 + 30?",
    "Explain in one sentence why the sky is blue.",
    "List three uses of copper wire, one per line, and then say which of them matters most in a house.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a short Python function that reverses a string. Explain each line of it as if I had never seen a program before.",
)


def test_demo_model_answers_as_transformers_does(demo_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    expected = transformers_generate(AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32), prompts, NUM_DEMO_TOKENS)
    for cpu_ops in ("off", "auto"):
        runner = make_runner(demo_folder, "float32", cpu_ops=cpu_ops)
        tokens, _ = generate(runner, prompts, NUM_DEMO_TOKENS, Way(chunk=48, batch=8, block_seed=1))
        assert tokens == expected, cpu_ops


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_tiny_models_of_each_architecture_agree(name: str, tmp_path: Path) -> None:
    model = save_tiny_model(name, tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 211) for _ in range(length)] for length in (1, 2, 17, 64, 65, 130, 300, 33)]
    expected = transformers_generate(model, prompts, NUM_TOKENS)
    tokens, _ = generate(make_runner(tmp_path, "float32"), prompts, NUM_TOKENS, Way(chunk=50, batch=8, block_seed=2))
    assert tokens == expected


def transformers_generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt, end-of-sequence ignored; prompts padded on the left into one batch."""
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = model.generate(input_ids=padded, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    tokens: list[list[int]] = out[:, longest:].tolist()
    return tokens
