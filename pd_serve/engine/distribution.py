"""Narrowing a distribution over tokens and drawing from it, without sorting or summing a whole vocabulary where less will do.

Called by the sampler. Every row is handled on its own: results do not depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.protocol.sampling import SamplingParams

_DEPTHS = (2.0, 4.0, 8.0, 16.0)
"""How far below the largest logit to look for the head of a distribution, tried in turn: sorting the few likely tokens is cheap."""
_BUCKET = 256
"""Tokens whose weights are summed first when drawing."""


def smallest_kept(row: Tensor, params: SamplingParams) -> float:
    """Smallest logit that top-k, top-p and min-p keep; tokens equal to it are kept too. -inf: all are.

    `row` [vocab_size] float32: logits divided by the temperature, shifted so that the largest is 0. Top-p is of what top-k left; min-p is
    relative to the likeliest token.
    """
    threshold = math.log(params.min_p) if params.min_p > 0 else -math.inf
    nucleus: float | None = None
    if 0 < params.top_k < row.shape[0]:
        kept = row.topk(params.top_k).values
        threshold = max(threshold, float(kept[-1]))
        if params.top_p < 1:
            nucleus = _nucleus_end(kept, float(kept.logsumexp(0)), params.top_p)
    elif params.top_p < 1:
        log_total = float(row.logsumexp(0))
        ends = (_nucleus_end(head, log_total, params.top_p) for head in _heads(row))
        nucleus = next((end for end in ends if end is not None), None)
    return threshold if nucleus is None else max(threshold, nucleus)


def pick(weights: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Of each row of `weights` [num_rows, vocab_size] float32 the first token whose cumulative weight exceeds uniform * total.

    `uniforms` in [0, 1), of at most 52 bits. Never a token of weight zero. Sums are in double precision, first by buckets.
    """
    token_ids: list[int] = pick_tokens(weights, torch.tensor(uniforms, dtype=torch.float64, device=weights.device)).tolist()
    return token_ids


def pick_tokens(weights: Tensor, uniforms: Tensor) -> Tensor:
    """pick() without leaving the device: `uniforms` [num_rows] float64, to [num_rows] int64. Rows that hold no numbers get some token."""
    num_rows, vocab_size = weights.shape
    buckets = F.pad(weights, (0, -vocab_size % _BUCKET)).view(num_rows, -1, _BUCKET)
    ends = buckets.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = uniforms[:, None] * ends[:, -1:]
    bucket = torch.searchsorted(ends, targets, right=True).clamp_(max=buckets.shape[1] - 1)
    before = F.pad(ends, (1, 0)).gather(1, bucket)
    inside = buckets[torch.arange(num_rows, device=weights.device), bucket.squeeze(1)].double()
    place = torch.searchsorted(inside.cumsum(dim=-1), targets - before, right=True)
    # Both sums round on their own: a target at a bucket's very end may lie beyond the sum inside, whose last weight then is meant.
    last = _BUCKET - 1 - inside.flip(1).gt(0).to(torch.uint8).argmax(dim=1, keepdim=True)
    return (bucket * _BUCKET + torch.minimum(place, last)).squeeze(1)


def _heads(row: Tensor) -> Iterator[Tensor]:
    """The logits within each depth of the largest, unordered, then all of them."""
    for depth in _DEPTHS:
        yield row[row >= -depth]
    yield row


def _nucleus_end(head: Tensor, log_total: float, top_p: float) -> float | None:
    """Last of the smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al., arXiv:1904.09751).

    None: all of `head` together does not reach it.
    """
    descending = head.sort(descending=True).values
    reached = (descending.double() - log_total).exp().cumsum(0) >= top_p
    position = int(reached.to(torch.uint8).argmax())
    return float(descending[position]) if bool(reached[position]) else None
