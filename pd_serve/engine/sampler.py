"""From logits to the next token of each sequence. Every row is computed on its own, so the token does not depend on the batch.

Order: penalties, logit bias, minimum-length mask or a grammar's; then temperature 0 takes the largest (the first of equals), else
temperature, top-k, top-p and min-p narrow the distribution and one uniform number, keyed by (seed, position), picks by the cumulative sum
in token order.
Log probabilities are those of the raw logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pd_serve.engine.batch import SampleSpec
from pd_serve.engine.distribution import pick, smallest_kept
from pd_serve.engine.grammar import TokenMasks
from pd_serve.engine.philox import uniform
from pd_serve.errors import EngineError
from pd_serve.protocol.sampling import SamplingParams, TokenLogprobs

_MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: dividing by it leaves float32."""


@dataclass(frozen=True, slots=True)
class Choice:
    token_id: int
    logprobs: TokenLogprobs | None


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec], masks: TokenMasks | None = None) -> tuple[Choice, ...]:
        """One choice per row of `logits` [num_rows, vocab_size]. Raises EngineError where a row holds no finite maximum."""
        if not specs:
            return ()
        if masks is None and all(is_greedy(spec.params) and not is_adjusted(spec) and spec.params.num_logprobs < 0 for spec in specs):
            return tuple(Choice(token_id, None) for token_id in _largest(logits))
        adjusted = logits.float()
        if adjusted is logits:
            adjusted = logits.clone()
        logprobs = _raw_logprobs(logits, specs)
        for row, spec in zip(adjusted, specs, strict=True):
            if is_adjusted(spec):
                _adjust(row, spec, self._eos_token_ids)
        if masks is not None:
            masks.forbid(adjusted)
        token_ids = _largest(adjusted)
        drawn = [index for index, spec in enumerate(specs) if not is_greedy(spec.params)]
        if drawn:
            for index, token_id in zip(drawn, _draw(adjusted[drawn], [specs[index] for index in drawn]), strict=True):
                token_ids[index] = token_id
        return tuple(
            Choice(token_id, None if row is None else _token_logprobs(row, token_id, spec.params.num_logprobs))
            for token_id, row, spec in zip(token_ids, logprobs, specs, strict=True)
        )


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _MIN_TEMPERATURE


def is_adjusted(spec: SampleSpec) -> bool:
    params = spec.params
    return bool(
        spec.masks_ends or params.logit_bias or params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )


def _largest(logits: Tensor) -> list[int]:
    """The first of equals. By numpy, which is several times faster at it than torch on a CPU."""
    rows = logits.float().cpu().numpy()
    token_ids: list[int] = rows.argmax(axis=-1).tolist()
    if not all(math.isfinite(row[token_id]) for row, token_id in zip(rows, token_ids, strict=True)):
        raise EngineError("the model produced logits that are not finite")
    return token_ids


def _adjust(row: Tensor, spec: SampleSpec, eos_token_ids: tuple[int, ...]) -> None:
    """Penalties, bias and mask, in place on one row [vocab_size]. Token ids outside the vocabulary have no effect."""
    params = spec.params
    vocab_size = row.shape[0]
    if params.repetition_penalty != 1.0:
        # Keskar et al., arXiv:1909.05858, section 4.1, over prompt and output as in transformers.
        seen = _indices({*spec.prompt_ids, *spec.output_ids}, row)
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = {token_id: count for token_id, count in Counter(spec.output_ids).items() if 0 <= token_id < vocab_size}
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        row[_indices(counts, row)] -= torch.tensor(penalties, dtype=row.dtype, device=row.device)
    if params.logit_bias:
        bias = [(token_id, value) for token_id, value in params.logit_bias if 0 <= token_id < vocab_size]
        values = torch.tensor([value for _, value in bias], dtype=row.dtype, device=row.device)
        row.index_add_(0, _indices([token_id for token_id, _ in bias], row), values)
    if spec.masks_ends:
        row[_indices({*eos_token_ids, *params.stop_token_ids}, row)] = -math.inf


def _indices(token_ids: Iterable[int], row: Tensor) -> Tensor:
    vocab_size = row.shape[0]
    return torch.tensor([token_id for token_id in token_ids if 0 <= token_id < vocab_size], dtype=torch.int64, device=row.device)


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Sample each row of `logits` [num_rows, vocab_size] float32 by inverting its cumulative distribution."""
    temperatures = torch.tensor([[spec.params.temperature] for spec in specs], dtype=torch.float32, device=logits.device)
    # The largest becomes 0, so that no temperature overflows.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values) / temperatures
    for row, spec in zip(scaled, specs, strict=True):
        threshold = smallest_kept(row, spec.params)
        if threshold > -math.inf:
            row.masked_fill_(row < threshold, -math.inf)
    return pick(scaled.exp_(), [uniform(spec.params.seed, spec.position) for spec in specs])


def _raw_logprobs(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Tensor | None]:
    return [
        torch.log_softmax(row.float(), dim=-1) if spec.params.num_logprobs >= 0 else None for row, spec in zip(logits, specs, strict=True)
    ]


def _token_logprobs(logprobs: Tensor, token_id: int, num_logprobs: int) -> TokenLogprobs:
    top = logprobs.topk(min(num_logprobs, logprobs.shape[0]))
    return TokenLogprobs(float(logprobs[token_id]), tuple(top.indices.tolist()), tuple(top.values.tolist()))
