"""The sampler for GPUs gives, on CPU tensors, what the CPU's gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pd_serve.engine import device_sampler
from pd_serve.engine.batch import SampleSpec
from pd_serve.engine.device_philox import uniforms
from pd_serve.engine.device_sampler import DeviceSampler
from pd_serve.engine.philox import uniform
from pd_serve.engine.sampler import Choice, Sampler
from pd_serve.errors import EngineError
from pd_serve.protocol.sampling import SamplingParams

EOS = (2,)
CPU = torch.device("cpu")


def _spec(position: int = 0, **fields: Any) -> SampleSpec:
    outside = {key: fields.pop(key) for key in ("prompt_ids", "output_ids", "eos_masked") if key in fields}
    return SampleSpec(SamplingParams(max_tokens=1, **fields), position, len(outside.get("output_ids", ())), **outside)


def _both(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[tuple[Choice, ...], tuple[Choice, ...]]:
    return DeviceSampler(EOS, CPU).sample(logits, specs), Sampler(EOS).sample(logits, specs)


def _random_spec(rng: random.Random, vocab_size: int) -> SampleSpec:
    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(-1, vocab_size + 2) for _ in range(count))

    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1e-12, 0.3, 1.0, 1.7, 50.0]),
        "top_k": rng.choice([0, 0, 1, 7, 60, vocab_size, vocab_size + 9]),
        "top_p": rng.choice([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999]),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.4]),
        "seed": rng.getrandbits(63),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.8, -0.6]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logit_bias": tuple((token_id, rng.uniform(-4, 4)) for token_id in ids(rng.choice([0, 0, 3]))),
        "stop_token_ids": ids(rng.choice([0, 1])),
    }
    return _spec(
        rng.choice([rng.randrange(5000), rng.getrandbits(40)]),
        prompt_ids=ids(9),
        output_ids=ids(6),
        eos_masked=rng.random() < 0.3,
        **fields,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_cpus_sampler(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    vocab_size, num_rows = rng.choice([11, 300, 3000]), rng.choice([1, 2, 17])
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.05, 1.0, 4.0])).to(dtype)
    kept = logits.clone()
    mine, theirs = _both(logits, [_random_spec(rng, vocab_size) for _ in range(num_rows)])
    assert mine == theirs
    assert torch.equal(logits, kept)


def test_equal_logits_keep_their_rules() -> None:
    logits = torch.zeros(6, 40)
    logits[:, [4, 9, 30]] = 3.0
    specs = [_spec(temperature=0.0), *(_spec(row, seed=row, top_k=2, top_p=0.4) for row in range(5))]
    mine, theirs = _both(logits, specs)
    assert mine == theirs
    assert mine[0].token_id == 4


def test_a_nucleus_beyond_the_head_is_found_by_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampler, "_HEAD", 16)
    depths: list[int] = []
    tokens = device_sampler._Draw.tokens

    def counted(draw: Any, depth: int) -> Any:
        depths.append(depth)
        return tokens(draw, depth)

    monkeypatch.setattr(device_sampler._Draw, "tokens", counted)
    logits = torch.randn(8, 2000, generator=torch.Generator().manual_seed(1)) * 0.05
    logits[::2] *= 200
    mine, theirs = _both(logits, [_spec(row, seed=3, top_p=0.9) for row in range(8)])
    assert mine == theirs
    assert depths == [16, 2000], "once for all rows, and once more for those of wide nuclei"


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    specs = [_spec(row, num_logprobs=count, logit_bias=((3, 9.0),)) for row, count in enumerate((-1, 0, 4, 50, 2))]
    mine, theirs = _both(logits, specs)
    for ours, others in zip(mine, theirs, strict=True):
        assert ours.token_id == others.token_id
        if others.logprobs is None:
            assert ours.logprobs is None
            continue
        assert ours.logprobs is not None
        assert ours.logprobs.top_ids == others.logprobs.top_ids
        assert ours.logprobs.top == pytest.approx(others.logprobs.top)
        assert ours.logprobs.chosen == pytest.approx(others.logprobs.chosen)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_engine_error(temperature: float) -> None:
    logits = torch.zeros(2, 600)
    logits[1, 3] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        DeviceSampler(EOS, CPU).sample(logits, [_spec(temperature=temperature, top_p=0.5), _spec(temperature=temperature, top_p=0.5)])


def test_nothing_to_sample_is_nothing() -> None:
    assert DeviceSampler(EOS, CPU).sample(torch.empty(0, 7), ()) == ()


def test_random_numbers_are_those_of_the_generator() -> None:
    rng = random.Random(4)
    pairs = [
        (0, 0),
        (1, 2**32),
        (2**63 - 1, 2**40 + 5),
        *((rng.getrandbits(63), rng.getrandbits(rng.choice([8, 33, 62]))) for _ in range(200)),
    ]
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(seed, position) for seed, position in pairs]
