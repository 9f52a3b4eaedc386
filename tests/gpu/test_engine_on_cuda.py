"""The CUDA path computes what the CPU path computes, in whatever pages its kernel accepts. NOT YET RUN ON A GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_serve.engine.batch import Batch, BatchEntry, Phase
from pd_serve.ids import AttemptId
from tests.accuracy.driver import Way, generate, make_runner

pytestmark = pytest.mark.gpu
PROMPTS = [[(37 * offset + 11 * length) % 40000 + 100 for offset in range(length)] for length in (1, 15, 16, 17, 130, 300)]
TOLERANCE = 0.5
"""Logits of SmolLM2 span about 40; bfloat16 against float32."""


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("chunk", [64, 10**6])
def test_logits_are_close_to_those_of_the_cpu_in_float32(demo_folder: Path, block_size: int, chunk: int) -> None:
    _, expected = generate(make_runner(demo_folder, "float32"), PROMPTS, 1, Way())
    runner = make_runner(demo_folder, "bfloat16", block_size=block_size, device="cuda")
    _, logits = generate(runner, PROMPTS, 1, Way(chunk=chunk, block_seed=1))
    for got, wanted in zip(logits, expected, strict=True):
        assert torch.max(torch.abs(got.float().cpu() - wanted)) < TOLERANCE


def test_output_does_not_depend_on_the_batch(demo_folder: Path) -> None:
    runner = make_runner(demo_folder, "bfloat16", block_size=256, device="cuda")
    together, _ = generate(runner, PROMPTS, 32, Way())
    alone, _ = generate(runner, PROMPTS, 32, Way(batch=1, block_seed=2))
    assert together == alone


def test_a_layers_event_means_that_its_kv_is_written(demo_folder: Path) -> None:
    """The bytes seen after waiting for layer i, while later layers run, are those of the finished step."""
    runner = make_runner(demo_folder, "bfloat16", block_size=256, device="cuda")
    events = runner.layer_events
    assert events is not None
    prompt = tuple(range(200, 712))
    entry = BatchEntry(AttemptId(1), Phase.PREFILL, prompt, 0, (0, 1), None)
    copies: dict[int, torch.Tensor] = {}
    side = torch.cuda.Stream()

    def copy(layer: int) -> None:
        events.wait(layer)
        with torch.cuda.stream(side):
            copies[layer] = runner.cache.layer(layer).slab[:2].clone()

    runner.execute(Batch(1, (entry,), has_push=True), copy)
    torch.cuda.synchronize()
    for layer, copied in copies.items():
        assert torch.equal(copied, runner.cache.layer(layer).slab[:2])
    assert len(copies) == runner.cache.layout.num_layers
