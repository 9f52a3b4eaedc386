from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pd_serve.engine.experts_info import ExpertsInfo, Scoring
from pd_serve.engine.linear import LinearFactory
from pd_serve.engine.models.mlp import GatedMLP
from pd_serve.engine.models.moe import Router, SparseMLP
from pd_serve.engine.native.operators import Fusion

HIDDEN, NUM_EXPERTS = 32, 8
PLAIN = ExpertsInfo(sparse_layers=(0,), num_experts=NUM_EXPERTS, num_chosen=3, intermediate_size=48)
BIASED = replace(PLAIN, scoring=Scoring.SIGMOID_BIASED, is_normalized=True, scaling=2.5, has_float32_router=True)


def route(info: ExpertsInfo, logits: list[float], bias: list[float] | None = None) -> dict[int, float]:
    """Weights by expert, of one token whose logits are given."""
    router = Router(info, lambda x, num_decode: x, None if bias is None else torch.tensor(bias))  # type: ignore[arg-type]
    weights, chosen = router(torch.tensor([logits]), 1)
    return dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))


LOGITS = [0.0, 3.0, 1.0, 2.0, -1.0, 2.5, 0.5, -2.0]


def test_the_best_experts_are_weighted_by_their_share_of_all() -> None:
    shares = torch.tensor(LOGITS).softmax(0).tolist()
    assert route(PLAIN, LOGITS) == pytest.approx({number: shares[number] for number in (1, 3, 5)})


def test_normalized_weights_add_up_to_one() -> None:
    weights = route(replace(PLAIN, is_normalized=True), LOGITS)
    assert sum(weights.values()) == pytest.approx(1.0)
    assert set(weights) == {1, 3, 5}


def test_a_bias_counts_for_the_choice_and_not_for_the_weight() -> None:
    bias = [0.0] * NUM_EXPERTS
    bias[7] = 5.0
    weights = route(BIASED, LOGITS, bias)
    scores = torch.tensor(LOGITS).sigmoid()
    total = float(scores[[7, 1, 5]].sum())
    assert weights == pytest.approx({number: 2.5 * float(scores[number]) / total for number in (7, 1, 5)})


def test_softmax_groups_are_judged_by_their_best_expert() -> None:
    # Of (0, 3), (1, 2), (-1, 2.5) and (0.5, -2) the first and the third have the best; 2 in the second is out of the question.
    assert set(route(replace(PLAIN, num_groups=4, num_chosen_groups=2), LOGITS)) == {0, 1, 5}


def test_sigmoid_groups_are_judged_by_their_best_two() -> None:
    weights = route(replace(BIASED, num_groups=4, num_chosen_groups=1), [9.0, -9.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * NUM_EXPERTS)
    assert {2, 3} <= set(weights)


@pytest.fixture
def mixture() -> SparseMLP:
    torch.manual_seed(0)
    linears = LinearFactory()

    def expert() -> GatedMLP:
        gate, up = (linears.make(torch.randn(48, HIDDEN), None, fusion) for fusion in (Fusion.SILU, Fusion.TIMES))
        return GatedMLP(gate, up, linears.make(torch.randn(HIDDEN, 48)))

    router = Router(BIASED, linears.make(torch.randn(NUM_EXPERTS, HIDDEN)), torch.randn(NUM_EXPERTS))
    return SparseMLP(router, [expert() for _ in range(NUM_EXPERTS)], expert())


def test_a_token_does_not_depend_on_its_company(mixture: SparseMLP) -> None:
    torch.manual_seed(1)
    x = torch.randn(67, HIDDEN)
    whole = mixture(x, 9)
    for first, past in ((0, 1), (3, 5), (8, 41), (9, 67), (66, 67)):
        part = mixture(x[first:past], max(0, min(9, past) - first))
        assert torch.equal(part, whole[first:past]), (first, past)


def test_every_chosen_expert_is_added_by_its_weight(mixture: SparseMLP) -> None:
    torch.manual_seed(2)
    x = torch.randn(5, HIDDEN)
    weights, chosen = mixture._router(x, 0)
    expected = mixture._shared(x, 0) if mixture._shared is not None else torch.zeros_like(x)
    for row in range(5):
        for weight, number in zip(weights[row], chosen[row].tolist(), strict=True):
            out: Tensor = mixture._experts[number](x[row : row + 1], 0)[0]
            expected[row] += weight * out
    torch.testing.assert_close(mixture(x, 0), expected)
