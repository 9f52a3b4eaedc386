"""sampler.py for a GPU: all rows of a step at once, and one answer from the device, whatever the number of sequences. NOT YET RUN ON A GPU.

The same tokens as Sampler gives on the same logits (tested on CPU tensors): same order of operations, same random numbers, same rules for
equal logits. Every row is computed on its own. A nucleus is looked for among the likeliest _HEAD tokens; the device answers with the tokens
which rows need more of them than that, and only those rows are done again over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pd_serve.engine.batch import SampleSpec
from pd_serve.engine.device_philox import uniforms
from pd_serve.engine.distribution import pick_tokens
from pd_serve.engine.grammar import TokenMasks
from pd_serve.engine.sampler import Choice, is_adjusted, is_greedy
from pd_serve.errors import EngineError
from pd_serve.protocol.sampling import TokenLogprobs

_HEAD = 1024
_SIGN, _SEEDS = 1 << 63, 1 << 64


class DeviceSampler:
    def __init__(self, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec], masks: TokenMasks | None = None) -> tuple[Choice, ...]:
        """One choice per row of `logits` [num_rows, vocab_size]. Raises EngineError where a row holds no finite maximum."""
        if not specs:
            return ()
        adjusted = self._adjusted(logits, specs)
        if masks is not None:
            adjusted = logits.to(torch.float32, copy=True) if adjusted is logits else adjusted
            masks.forbid(adjusted)
        values, largest = adjusted.max(dim=-1)
        answer = [largest, (~values.isfinite()).any()[None].long()]
        drawn = [index for index, spec in enumerate(specs) if not is_greedy(spec.params)]
        draw = None
        if drawn:
            draw = _Draw.of(adjusted, [specs[index] for index in drawn], drawn, self._device)
            answer += draw.tokens(_HEAD)
        flat: list[int] = torch.cat(answer).tolist()
        token_ids, is_broken, picked, is_short = _split(flat, (len(specs), 1, len(drawn), len(drawn)))
        if is_broken[0]:
            raise EngineError("the model produced logits that are not finite")
        if draw is not None and any(is_short):
            short = [index for index, more in enumerate(is_short) if more]
            for index, token_id in zip(short, draw.of_rows(short).tokens(adjusted.shape[1])[0].tolist(), strict=True):
                picked[index] = token_id
        for index, token_id in zip(drawn, picked, strict=True):
            token_ids[index] = token_id
        logprobs = self._logprobs(logits, specs, token_ids)
        return tuple(Choice(token_id, logprobs.get(row)) for row, token_id in enumerate(token_ids))

    def _adjusted(self, logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        """Penalties, bias and mask, of all rows in one write each; `logits` themselves where nothing asks for more."""
        if all(is_greedy(spec.params) and not is_adjusted(spec) for spec in specs):
            return logits
        adjusted = logits.float()
        vocab_size = logits.shape[1]
        repeated, counted, biased, masked = (_Places(vocab_size) for _ in range(4))
        for row, spec in enumerate(specs):
            if not is_adjusted(spec):
                continue
            params = spec.params
            if params.repetition_penalty != 1.0:
                repeated.add(row, ((token_id, params.repetition_penalty) for token_id in {*spec.prompt_ids, *spec.output_ids}))
            if params.presence_penalty or params.frequency_penalty:
                counts = Counter(spec.output_ids).items()
                counted.add(row, ((token_id, params.presence_penalty + params.frequency_penalty * count) for token_id, count in counts))
            biased.add(row, params.logit_bias)
            if spec.masks_ends:
                masked.add(row, ((token_id, -math.inf) for token_id in {*self._eos_token_ids, *params.stop_token_ids}))
        touched = [places for places in (repeated, counted, biased, masked) if places.rows]
        if touched and adjusted is logits:
            adjusted = logits.clone()
        if repeated.rows:
            # Keskar et al., arXiv:1909.05858, section 4.1, over prompt and output as in transformers.
            at, penalties = repeated.on(self._device)
            scores = adjusted[at]
            adjusted[at] = torch.where(scores > 0, scores / penalties, scores * penalties)
        if counted.rows:
            at, penalties = counted.on(self._device)
            adjusted[at] -= penalties
        if biased.rows:
            at, values = biased.on(self._device)
            adjusted.index_put_(at, values, accumulate=True)
        if masked.rows:
            at, values = masked.on(self._device)
            adjusted[at] = values
        return adjusted

    def _logprobs(self, logits: Tensor, specs: Sequence[SampleSpec], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By row, of those that ask for them: of the raw logits."""
        rows = [row for row, spec in enumerate(specs) if spec.params.num_logprobs >= 0]
        if not rows:
            return {}
        asked = [min(specs[row].params.num_logprobs, logits.shape[1]) for row in rows]
        logprobs = torch.log_softmax(logits[torch.tensor(rows, device=self._device)].float(), dim=-1)
        chosen = logprobs.gather(1, torch.tensor([[token_ids[row]] for row in rows], device=self._device))
        top = logprobs.topk(max(asked))
        values, indices = torch.cat((chosen, top.values), dim=1).tolist(), top.indices.tolist()
        return {
            row: TokenLogprobs(values[index][0], tuple(indices[index][:count]), tuple(values[index][1 : count + 1]))
            for index, (row, count) in enumerate(zip(rows, asked, strict=True))
        }


@dataclass(slots=True)
class _Places:
    """Logits to change, and a number for each. Token ids outside the vocabulary have no effect."""

    vocab_size: int
    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, changes: Iterable[tuple[int, float]]) -> None:
        for token_id, value in changes:
            if 0 <= token_id < self.vocab_size:
                self.rows.append(row)
                self.token_ids.append(token_id)
                self.values.append(value)

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        at = torch.tensor((self.rows, self.token_ids)).to(device, non_blocking=True)
        return (at[0], at[1]), torch.tensor(self.values, dtype=torch.float32).to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Rows to draw from, and how."""

    scaled: Tensor
    """[num_rows, vocab_size] float32: logits divided by the temperature, the largest 0, so that no temperature overflows"""
    reals: Tensor
    """[3, num_rows] float64: temperature, top-p, log of min-p"""
    integers: Tensor
    """[3, num_rows] int64: seed, position, top-k (0: all)"""
    max_top_k: int
    is_cut: bool
    """Some row has a top-k or a top-p."""

    @classmethod
    def of(cls, logits: Tensor, specs: Sequence[SampleSpec], rows: Sequence[int], device: torch.device) -> _Draw:
        """Of `rows` of `logits` float32, one per spec."""
        params, vocab_size = [spec.params for spec in specs], logits.shape[1]
        log_min_ps = [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in params]
        top_ks = [each.top_k if 0 < each.top_k < vocab_size else 0 for each in params]
        reals = torch.tensor([[each.temperature for each in params], [each.top_p for each in params], log_min_ps], dtype=torch.float64)
        integers = torch.tensor([[_signed(each.seed) for each in params], [spec.position for spec in specs], top_ks])
        reals, integers = reals.to(device, non_blocking=True), integers.to(device, non_blocking=True)
        own = logits if len(rows) == logits.shape[0] else logits[torch.tensor(rows).to(device, non_blocking=True)]
        scaled = (own - own.max(dim=-1, keepdim=True).values) / reals[0, :, None].float()
        return cls(scaled, reals, integers, max(top_ks), any(top_ks) or any(each.top_p < 1 for each in params))

    def of_rows(self, rows: Sequence[int]) -> _Draw:
        at = torch.tensor(rows).to(self.scaled.device, non_blocking=True)
        return _Draw(self.scaled[at], self.reals[:, at], self.integers[:, at], self.max_top_k, self.is_cut)

    def tokens(self, depth: int) -> tuple[Tensor, Tensor]:
        """The tokens drawn, and 1 for every row whose nucleus is larger than `depth` tokens, where the token means nothing; int64."""
        smallest = self.reals[2].float()
        is_short = torch.zeros_like(self.integers[0])
        if self.is_cut:
            cut, is_short = self._smallest_kept(depth)
            smallest = torch.maximum(smallest, cut)
        weights = self.scaled.masked_fill(self.scaled < smallest[:, None], -math.inf).exp_()
        return pick_tokens(weights, uniforms(self.integers[0], self.integers[1])), is_short

    def _smallest_kept(self, depth: int) -> tuple[Tensor, Tensor]:
        """Smallest logit that top-k and top-p keep, [num_rows] float32 (distribution.smallest_kept); and where it is not known."""
        vocab_size, top_k, top_p = self.scaled.shape[1], self.integers[2], self.reals[1]
        depth = min(vocab_size, max(depth, self.max_top_k))
        head = self.scaled.topk(depth).values
        has_top_k = top_k > 0
        smallest = head.gather(1, (top_k - 1).clamp(0, depth - 1)[:, None])[:, 0].masked_fill(~has_top_k, -math.inf)
        is_out = has_top_k[:, None] & (torch.arange(depth, device=head.device) >= top_k[:, None])
        kept = head.masked_fill(is_out, -math.inf)
        log_total = torch.where(has_top_k, kept.logsumexp(-1), self.scaled.logsumexp(-1))
        # Last of the smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al., arXiv:1904.09751).
        reached = (kept.double() - log_total.double()[:, None]).exp().cumsum(-1) >= top_p[:, None]
        is_reached, is_narrowed = reached.any(-1), top_p < 1
        end = kept.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
        smallest = torch.where(is_narrowed & is_reached, torch.maximum(smallest, end), smallest)
        is_short = is_narrowed & ~is_reached & ~has_top_k if depth < vocab_size else torch.zeros_like(is_narrowed)
        return smallest, is_short.long()


def _signed(seed: int) -> int:
    """The int64 with the seed's 64 bits."""
    return (seed + _SIGN) % _SEEDS - _SIGN


def _split(flat: list[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, first = [], 0
    for size in sizes:
        parts.append(flat[first : first + size])
        first += size
    return parts
