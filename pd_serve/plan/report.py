"""All that `pd-serve plan cost` says, as one JSON object. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.cost import Pause, PromptCost, Setting, pause, prompt_cost
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import Link
from pd_serve.plan.shape import ModelShape
from pd_serve.plan.verdict import Hints, Verdict, verdict

_DEGREES = (1, 2, 4, 8, 16)


class RankBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV of one token on each of `tp` ranks, in the plan's type."""

    tp: int
    per_rank: int
    all_ranks: int
    """More than one copy where ranks hold the same heads."""


class TokenBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV of one token, over all layers."""

    bfloat16: int
    fp8: int
    """Half of it, as published tables count."""
    fp8_with_scales: int
    """As pd-serve keeps it: a byte more per token, head, plane and layer."""
    chosen: int
    """In the plan's type."""
    ranks: tuple[RankBytes, ...]


class CostReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    setting: Setting
    links: tuple[Link, ...]
    token_bytes: TokenBytes
    prompts: tuple[PromptCost, ...]
    pauses_of: int
    """Prompt tokens that the pauses and the verdict are for."""
    pauses: tuple[Pause, ...]
    hints: Hints
    verdicts: tuple[Verdict, ...]
    """By link."""


def cost_report(setting: Setting, links: Sequence[Link], lengths: Sequence[int], chunks: Sequence[int], hints: Hints) -> CostReport:
    """Raises PlanError for what cannot be computed."""
    return CostReport(
        setting=setting,
        links=tuple(links),
        token_bytes=_token_bytes(setting),
        prompts=tuple(prompt_cost(setting, length, links) for length in lengths),
        pauses_of=hints.prompt_tokens,
        pauses=tuple(pause(setting, hints.prompt_tokens, chunk) for chunk in (0, *chunks) if chunk < hints.prompt_tokens),
        hints=hints,
        verdicts=tuple(verdict(setting, link, hints) for link in links),
    )


def _token_bytes(setting: Setting) -> TokenBytes:
    shape = setting.shape
    return TokenBytes(
        bfloat16=shape.bytes_per_token(KVDtype.BFLOAT16),
        fp8=shape.bytes_per_token(KVDtype.FP8_E4M3, has_scales=False),
        fp8_with_scales=shape.bytes_per_token(KVDtype.FP8_E4M3),
        chosen=shape.bytes_per_token(setting.dtype, setting.has_scales),
        ranks=tuple(_rank_bytes(shape, setting)),
    )


def _rank_bytes(shape: ModelShape, setting: Setting) -> list[RankBytes]:
    found: list[RankBytes] = []
    for tp in sorted({*_DEGREES, setting.decode_tp}):
        try:
            per_rank = shape.rank_bytes_per_token(setting.dtype, tp, setting.has_scales)
        except PlanError:
            continue
        found.append(RankBytes(tp, per_rank, tp * per_rank))
    return found
