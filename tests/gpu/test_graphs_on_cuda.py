"""Captured decode steps on CUDA give the eager steps' tokens. NOT YET RUN ON A GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams
from tests.accuracy.driver import Way, generate, make_runner

pytestmark = pytest.mark.gpu
PROMPTS = [[(37 * offset + 11 * length) % 40000 + 100 for offset in range(length)] for length in (1, 15, 16, 17, 130, 300)]
TOLERANCE = 0.5
"""Logits of SmolLM2 span about 40; products of another number of rows may round otherwise."""


@pytest.mark.parametrize("block_size", [16, 256])
def test_replayed_logits_are_those_of_eager_steps(demo_folder: Path, block_size: int) -> None:
    runner = make_runner(demo_folder, "bfloat16", block_size=block_size, device="cuda")
    graphs = runner.graphs
    assert graphs is not None, "engine.cuda_graphs is on by default"
    # One step behind the prompts: beyond it near ties may lead elsewhere.
    _, replayed = generate(runner, PROMPTS, 2, Way())
    runner.use_graphs(None)
    _, eager = generate(runner, PROMPTS, 2, Way())
    for got, wanted in zip(replayed, eager, strict=True):
        assert torch.max(torch.abs(got.float() - wanted.float())) < TOLERANCE


def test_every_bucket_replays_and_idle_rows_stay_away_from_the_pool(demo_folder: Path) -> None:
    runner = make_runner(demo_folder, "bfloat16", block_size=256, num_blocks=300, device="cuda")
    graphs = runner.graphs
    assert graphs is not None
    spec = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), 8, 0)
    for count in (1, 2, 3, 5, 31, 33, 255):
        before = runner.cache.layer(0).slab[count:299].clone()
        entries = tuple(BatchEntry(AttemptId(index), Phase.DECODE, (50 + index,), 7, (index,), spec) for index in range(count))
        assert len(runner.execute(Batch(1, entries)).sampled) == count
        assert torch.equal(runner.cache.layer(0).slab[count:299], before)
