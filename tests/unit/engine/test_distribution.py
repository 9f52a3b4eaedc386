from __future__ import annotations

import pytest
import torch

from pd_serve.engine.distribution import pick, smallest_kept
from pd_serve.protocol.sampling import SamplingParams

ALMOST_ONE = 1 - 2**-52


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_pick_inverts_the_cumulative_sum(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(1, vocab_size, generator=generator) * (torch.rand(1, vocab_size, generator=generator) < 0.5)
    weights[0, vocab_size // 2] = 0.3
    ends = weights[0].double().cumsum(0)
    for uniform in (0.0, 0.1, 0.5, 0.9, ALMOST_ONE):
        token_id = pick(weights, [uniform])[0]
        assert weights[0, token_id] > 0
        assert float(ends[token_id]) >= uniform * float(ends[-1]) - 1e-9
        assert float(ends[token_id] - weights[0, token_id]) <= uniform * float(ends[-1]) + 1e-9


def test_weightless_tokens_are_never_picked_at_the_edges() -> None:
    weights = torch.zeros(2, 600)
    weights[:, [300, 511]] = 1.0
    assert pick(weights, [0.0, ALMOST_ONE]) == [300, 511]


def test_sums_are_exact_enough_for_a_long_flat_tail() -> None:
    weights = torch.full((1, 150_000), 1e-4)
    assert pick(weights, [0.99999])[0] == pytest.approx(149_998, abs=1)


def test_everything_is_kept_without_filters() -> None:
    row = torch.tensor([0.0, -5.0, -50.0])
    assert smallest_kept(row, SamplingParams(max_tokens=1)) == float("-inf")
    assert smallest_kept(row, SamplingParams(max_tokens=1, top_k=3)) == float("-inf")


def test_a_nucleus_deeper_than_the_first_guesses_is_found() -> None:
    row = torch.cat((torch.zeros(1), torch.full((100_000,), -10.0)))
    assert smallest_kept(row, SamplingParams(max_tokens=1, top_p=0.9)) == -10.0
    assert smallest_kept(row, SamplingParams(max_tokens=1, top_p=0.1)) == 0.0
