from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pd_serve.engine.batch import SampleSpec
from pd_serve.engine.philox import uniform
from pd_serve.engine.sampler import Choice, Sampler
from pd_serve.errors import EngineError
from pd_serve.protocol.sampling import SamplingParams

EOS = (2,)
VOCAB = 12


def _spec(position: int = 0, **fields: Any) -> SampleSpec:
    outside = {key: fields.pop(key) for key in ("prompt_ids", "output_ids", "eos_masked") if key in fields}
    return SampleSpec(SamplingParams(max_tokens=1, **fields), position, len(outside.get("output_ids", ())), **outside)


def _sample(logits: Tensor, *specs: SampleSpec) -> tuple[Choice, ...]:
    return Sampler(EOS).sample(logits, specs)


def _logits(seed: int = 0, rows: int = 1, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def _reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, written out with sorted lists."""
    weights = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    kept = order[: params.top_k] if params.top_k else order
    total, head, mass = sum(weights[token] for token in kept), [], 0.0
    for token in kept:
        head.append(token)
        mass += weights[token] / total
        if mass >= params.top_p:
            break
    head = [token for token in head if weights[token] >= params.min_p * weights[order[0]]]
    total = sum(weights[token] for token in head)
    return [weights[token] / total if token in head else 0.0 for token in range(len(weights))]


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [4, 9]] = 3.0
    logits[1, 7] = 1.0
    assert [choice.token_id for choice in _sample(logits, _spec(temperature=0.0), _spec(temperature=0.0))] == [4, 7]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "top_k": 4},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"top_k": 5, "top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    {"top_k": 1},
    {"top_k": 1000},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_token_frequencies_follow_the_reference_distribution(fields: dict[str, Any]) -> None:
    num_draws = 3000
    logits = _logits(5)
    expected = _reference_distribution(logits[0].tolist(), SamplingParams(max_tokens=1, **fields))
    specs = [_spec(position, seed=11, **fields) for position in range(num_draws)]
    counts = Counter(choice.token_id for choice in _sample(logits.expand(num_draws, -1), *specs))
    assert all(expected[token] > 0 for token in counts)
    statistic = sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in enumerate(expected) if p)
    # Chi-squared with at most 11 degrees of freedom: above 40 once in thirty thousand; the draws are fixed.
    assert statistic < 40


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_each_draw_inverts_the_cumulative_distribution(fields: dict[str, Any]) -> None:
    logits = _logits(6)
    expected = _reference_distribution(logits[0].tolist(), SamplingParams(max_tokens=1, **fields))
    specs = [_spec(position, seed=3, **fields) for position in range(200)]
    for spec, choice in zip(specs, _sample(logits.expand(200, -1), *specs), strict=True):
        below = sum(expected[: choice.token_id])
        assert below - 1e-5 <= uniform(3, spec.position) <= below + expected[choice.token_id] + 1e-5


def test_a_wide_nucleus_over_a_large_vocabulary_is_found_by_sorting() -> None:
    logits = _logits(7, vocab_size=5000) * 0.05
    cut = _reference_distribution(logits[0].tolist(), SamplingParams(max_tokens=1, top_p=0.9))
    specs = [_spec(position, seed=1, top_p=0.9) for position in range(300)]
    drawn = [choice.token_id for choice in _sample(logits.expand(300, -1), *specs)]
    assert all(cut[token] > 0 for token in drawn)
    assert len(set(drawn)) > 200


def test_the_token_does_not_depend_on_the_batch() -> None:
    rows = 9
    logits = _logits(8, rows, vocab_size=3000).to(torch.bfloat16)
    many = [_spec(100 + row, seed=row, top_p=0.9, top_k=50 * (row % 3), min_p=0.01 * (row % 2), num_logprobs=2) for row in range(rows)]
    together = _sample(logits, *many)
    alone = tuple(_sample(logits[row : row + 1], many[row])[0] for row in range(rows))
    reversed_order = _sample(logits.flip(0), *many[::-1])[::-1]
    with_greedy = _sample(torch.cat((logits[:1], logits)), _spec(temperature=0.0), *many)[1:]
    assert together == alone == reversed_order == with_greedy


def test_another_position_or_seed_draws_anew() -> None:
    logits = torch.zeros(1, 1000)
    first, position, seed, again = (_sample(logits, spec)[0].token_id for spec in (_spec(1), _spec(2), _spec(1, seed=5), _spec(1)))
    assert first == again
    assert len({first, position, seed}) == 3


def test_extreme_temperatures_are_defined() -> None:
    logits = _logits(9) * 1e4
    assert _sample(logits, _spec(temperature=1e-12))[0].token_id == int(logits.argmax())
    assert _sample(logits, _spec(temperature=2e-5))[0].token_id == int(logits.argmax())
    assert 0 <= _sample(logits, _spec(temperature=1e30))[0].token_id < VOCAB


def test_repetition_penalty_covers_prompt_and_output_and_shrinks_towards_zero() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, 1.2, 0.0]])
    assert _sample(logits, _spec(temperature=0.0, repetition_penalty=2.0, prompt_ids=(0,)))[0].token_id == 1
    assert _sample(logits, _spec(temperature=0.0, repetition_penalty=2.0, prompt_ids=(0, 0), output_ids=(1,)))[0].token_id == 3
    negative = torch.tensor([[-1.0, -1.5]])
    assert _sample(negative, _spec(temperature=0.0, repetition_penalty=2.0, prompt_ids=(0,)))[0].token_id == 1


def test_presence_and_frequency_penalties_count_output_tokens_alone() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5]])
    assert _sample(logits, _spec(temperature=0.0, presence_penalty=1.2, prompt_ids=(0,)))[0].token_id == 0
    assert _sample(logits, _spec(temperature=0.0, presence_penalty=1.2, output_ids=(0, 0)))[0].token_id == 1
    assert _sample(logits, _spec(temperature=0.0, frequency_penalty=0.6, output_ids=(0,)))[0].token_id == 0
    assert _sample(logits, _spec(temperature=0.0, frequency_penalty=0.6, output_ids=(0, 0)))[0].token_id == 1
    assert _sample(logits, _spec(temperature=0.0, frequency_penalty=-1.0, output_ids=(2, 2)))[0].token_id == 2


def test_logit_bias_is_added_and_repeats_add_up() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5]])
    assert _sample(logits, _spec(temperature=0.0, logit_bias=((1, 1.5),)))[0].token_id == 1
    assert _sample(logits, _spec(temperature=0.0, logit_bias=((2, 1.0), (2, 1.0))))[0].token_id == 2
    assert _sample(logits, _spec(temperature=0.0, logit_bias=((0, -100.0), (1, -100.0))))[0].token_id == 2


def test_end_and_stop_tokens_are_masked_until_the_minimum_length() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    assert _sample(logits, _spec(temperature=0.0))[0].token_id == 2
    assert _sample(logits, _spec(temperature=0.0, eos_masked=True))[0].token_id == 3
    assert _sample(logits, _spec(temperature=0.0, eos_masked=True, stop_token_ids=(3,)))[0].token_id == 1
    masked_and_biased = _spec(temperature=0.0, eos_masked=True, logit_bias=((2, 100.0),))
    assert _sample(logits, masked_and_biased)[0].token_id == 3


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    spec = _spec(
        temperature=0.0,
        logit_bias=((99, 5.0), (-1, 5.0)),
        stop_token_ids=(99,),
        eos_masked=True,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        prompt_ids=(99,),
        output_ids=(99, -3),
    )
    assert _sample(torch.tensor([[1.0, 3.0, 9.0]]), spec)[0].token_id == 1


def test_one_rows_adjustments_leave_the_others_and_the_logits_alone() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0]])
    choices = _sample(logits, _spec(temperature=0.0, logit_bias=((0, -9.0),)), _spec(temperature=0.0))
    assert [choice.token_id for choice in choices] == [1, 0]
    assert logits.tolist() == [[2.0, 1.0], [2.0, 1.0]]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = _logits(10)
    expected = torch.log_softmax(logits[0], -1)
    spec = _spec(temperature=0.3, logit_bias=((3, 50.0),), num_logprobs=4)
    choice = _sample(logits, spec)[0]
    assert choice.token_id == 3
    assert choice.logprobs is not None
    assert choice.logprobs.chosen == pytest.approx(float(expected[3]))
    assert choice.logprobs.top_ids == tuple(expected.topk(4).indices.tolist())
    assert choice.logprobs.top == pytest.approx(expected.topk(4).values.tolist())


def test_logprobs_are_given_only_where_asked_for() -> None:
    logits = _logits(11, 3)
    none, chosen, all_of_them = _sample(logits, _spec(), _spec(num_logprobs=0), _spec(num_logprobs=VOCAB + 5))
    assert none.logprobs is None
    assert chosen.logprobs is not None
    assert chosen.logprobs.top_ids == ()
    assert all_of_them.logprobs is not None
    assert len(all_of_them.logprobs.top_ids) == VOCAB


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_engine_error(temperature: float) -> None:
    logits = _logits(12, 2)
    logits[1, 3] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        _sample(logits, _spec(temperature=temperature), _spec(temperature=temperature))


def test_nothing_to_sample_is_nothing() -> None:
    assert Sampler(EOS).sample(torch.empty(0, VOCAB), ()) == ()
