"""What moving a prompt's KV costs beside computing it. Pure arithmetic; called by `pd-serve plan cost` and the verdict.

prefill    FLOP / (FLOP per second of all GPUs of the prefill worker), or tokens / measured tokens per second
wire       bytes that all ranks of the decode worker get / (bytes per second of a link x links side by side)
exposed    what a client waits for beyond prefill. Whole after the last layer: set-up + wire. Layer by layer, with L layers of which
           each is sent when it has been computed and those before it have left:

    compute  |--0--|--1--|--2--|--3--|                    link faster than compute: the last layer alone is left, wire / L
    wire           |0|   |1|   |2|   |3|
    wire           |---0---|---1---|---2---|---3---|      slower: all of it, less what compute was still there to hide

           set-up + max(wire / L, wire - prefill x (L - 1) / L)

The set-up (reserve, first push, notice) is not hidden by anything. Chunks hide more than a whole prompt: the last one alone is left.
pause      what a decode beside it waits for: the longest of the prompt's steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pd_serve.kv.layout import KVDtype
from pd_serve.plan.errors import PlanError
from pd_serve.plan.hardware import Link
from pd_serve.plan.shape import ModelShape

_SLOWEST, _FASTEST = 1e-3, 1e21
"""Of FLOP and of tokens per second: beyond them times are 0 or without end."""
_LONGEST_SETUP_S = 3600.0


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one prefill worker, all its GPUs together. One of the two is above 0."""

    flop_per_s: float = 0.0
    """Reached, not the peak."""
    tokens_per_s: float = 0.0
    """Measured, at whatever lengths it was: no attention term is added."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    shape: ModelShape
    speed: Speed
    dtype: KVDtype = KVDtype.BFLOAT16
    has_scales: bool = False
    """Of fp8, as ModelShape.bytes_per_token."""
    decode_tp: int = 1
    num_links: int = 1
    """Side by side: NICs between the two workers."""
    setup_s: float = 0.0
    """Per request."""
    has_attention: bool = False
    """The quadratic term is counted."""

    def __post_init__(self) -> None:
        if (self.speed.flop_per_s > 0) == (self.speed.tokens_per_s > 0):
            raise PlanError("how fast prompts are computed: give FLOP/s or tokens/s, one of them, above 0")
        for unit, value in (("FLOP/s", self.speed.flop_per_s), ("tokens/s", self.speed.tokens_per_s)):
            if value and not _SLOWEST <= value <= _FASTEST:
                raise PlanError(f"prefill at {value:g} {unit}: expected {_SLOWEST:g} to {_FASTEST:g}")
        if not 0 <= self.setup_s <= _LONGEST_SETUP_S:
            raise PlanError(f"a set-up of {self.setup_s:g} s: expected 0 to {_LONGEST_SETUP_S:g}")
        if min(self.decode_tp, self.num_links) < 1:
            raise PlanError("TP degrees and links are at least 1")

    @property
    def bytes_per_token(self) -> int:
        """On the wire."""
        return self.shape.sent_bytes_per_token(self.dtype, self.decode_tp, self.has_scales)

    def prefill_s(self, num_tokens: int, behind: int = 0) -> float:
        """Of a chunk whose first `behind` tokens are in the cache."""
        if self.speed.tokens_per_s:
            return num_tokens / self.speed.tokens_per_s
        return self.shape.prompt_flop(num_tokens, behind, self.has_attention) / self.speed.flop_per_s


class HandOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one prompt over one link."""

    link: str
    wire_s: float
    share: float
    """Wire by prefill: what published tables give."""
    whole_s: float
    """Exposed, sent when all has been computed."""
    exposed_s: float
    """Exposed, sent layer by layer."""
    exposed_share: float
    """Of prefill."""


class PromptCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_tokens: int
    kv_nbytes: int
    """One copy of it."""
    sent_nbytes: int
    seen_nbytes: float
    """Of one copy what the next token looks at: less where layers have windows."""
    prefill_s: float
    attention_share: float
    """Of the prompt's FLOP, whether or not it is counted in prefill_s."""
    hand_overs: tuple[HandOver, ...]


class Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Put into a colocated decode by one prompt."""

    chunk: int
    """Tokens of a step; 0: the whole prompt."""
    num_steps: int
    longest_s: float


def hand_over(setting: Setting, num_tokens: int, link: Link) -> HandOver:
    prefill_s = setting.prefill_s(num_tokens)
    wire_s = num_tokens * setting.bytes_per_token / (link.bytes_per_s * setting.num_links)
    num_layers = setting.shape.num_layers
    exposed_s = setting.setup_s + max(wire_s / num_layers, wire_s - prefill_s * (num_layers - 1) / num_layers)
    return HandOver(link.name, wire_s, wire_s / prefill_s, setting.setup_s + wire_s, exposed_s, exposed_s / prefill_s)


def prompt_cost(setting: Setting, num_tokens: int, links: Sequence[Link]) -> PromptCost:
    """Raises PlanError for no prompt."""
    if num_tokens < 1:
        raise PlanError(f"a prompt of {num_tokens} tokens: expected at least 1")
    shape = setting.shape
    per_token = shape.bytes_per_token(setting.dtype, setting.has_scales)
    return PromptCost(
        num_tokens=num_tokens,
        kv_nbytes=num_tokens * per_token,
        sent_nbytes=num_tokens * setting.bytes_per_token,
        seen_nbytes=shape.seen_tokens(num_tokens) * per_token,
        prefill_s=setting.prefill_s(num_tokens),
        attention_share=shape.attention_flop(num_tokens) / shape.prompt_flop(num_tokens),
        hand_overs=tuple(hand_over(setting, num_tokens, link) for link in links),
    )


def pause(setting: Setting, num_tokens: int, chunk: int = 0) -> Pause:
    """`chunk` 0: the prompt in one step."""
    size = chunk or num_tokens
    starts = range(0, num_tokens, size)
    # The longest is a whole chunk near the end: the more is in the cache, the more attention sees.
    longest_s = max(setting.prefill_s(min(size, num_tokens - start), start) for start in starts[-2:])
    return Pause(chunk, len(starts), longest_s)


def shortest_prompt(setting: Setting, link: Link, share: float, longest: int) -> int | None:
    """Least prompt tokens at which the exposed share is at most `share`, as sent layer by layer; None: none up to `longest`."""
    low, high = 0, longest
    if hand_over(setting, longest, link).exposed_share > share:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if hand_over(setting, middle, link).exposed_share <= share:
            high = middle
        else:
            low = middle
    return high
