"""The sampler for GPUs gives on CUDA the tokens that it gives on CPU. NOT YET RUN ON A GPU."""

from __future__ import annotations

import random

import pytest
import torch

from pd_serve.engine.batch import SampleSpec
from pd_serve.engine.device_philox import uniforms
from pd_serve.engine.device_sampler import DeviceSampler
from pd_serve.engine.philox import uniform
from pd_serve.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]
NUM_ROWS, VOCAB_SIZE = 256, 32000


def test_random_numbers_are_the_same_bits() -> None:
    rng = random.Random(1)
    pairs = [(rng.getrandbits(63), rng.getrandbits(40)) for _ in range(1000)]
    seeds, positions = (torch.tensor(column, device="cuda") for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(seed, position) for seed, position in pairs]


def test_tokens_are_those_of_the_cpu() -> None:
    """But for draws that fall on an edge: sums on the two round on their own."""
    rng = random.Random(2)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3
    specs = [
        SampleSpec(
            SamplingParams(
                max_tokens=1,
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 40]),
                top_p=rng.choice([1.0, 0.9]),
                min_p=rng.choice([0.0, 0.05]),
                seed=rng.getrandbits(63),
            ),
            row,
            0,
        )
        for row in range(NUM_ROWS)
    ]
    on_cpu = DeviceSampler((2,), torch.device("cpu")).sample(logits, specs)
    on_cuda = DeviceSampler((2,), torch.device("cuda")).sample(logits.cuda(), specs)
    assert sum(mine.token_id != other.token_id for mine, other in zip(on_cuda, on_cpu, strict=True)) <= 2
