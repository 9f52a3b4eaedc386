"""Whether to part prefill from decode, and why. Pure; called by `pd-serve plan cost`.

It pays where tails of latency are limited and prompts are long or come in bursts, or where the two phases want different parallelism, over
a path that is wide (200 Gb/s, or a hand-over that stays small beside prefill). It does not for short prompts at low concurrency, for
offline batches, and for pools too small to batch well: there chunked prefill in one pool does the same with less. It improves latency
tails, not throughput.

The limits below are judgements, not measurements: they say where to look, and the figures that they judge are printed beside them.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from pd_serve.plan.cost import Setting, hand_over, pause, shortest_prompt
from pd_serve.plan.hardware import Link

WIDE_BYTES_PER_S = 25e9
"""200 Gb/s per path."""
NARROW_BYTES_PER_S = 12.5e9
"""100 Gb/s per path: without fp8, the ratio decides."""
SMALL_SHARE = 0.1
"""An exposed hand-over that is at most so much of prefill is small."""
SHORT_PROMPT = 512
LONG_PROMPT = 2048
LOW_CONCURRENCY = 8
SMALL_POOL = 4
"""Workers: with fewer, one phase has a single one, and either idles while the other queues."""
BEST_CHUNK = 512
"""Tokens of a step: the strict budget of Sarathi-Serve (OSDI 2024); smaller ones read the weights too often for what they compute."""
_NEGLIGIBLE_PROMPT = 16
TAILS = "it improves latency tails, not throughput: for throughput alone, one pool with chunked prefill is at least as good"


class Answer(Enum):
    YES = "yes"
    PERHAPS = "perhaps"
    NO = "no"


class Hints(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of the load. 0: not said."""

    prompt_tokens: int
    """A long one: what the pauses come from."""
    itl_slo_s: float = 0.0
    """p99 of the gaps between tokens."""
    is_bursty: bool = False
    is_offline: bool = False
    has_different_tp: bool = False
    """The phases want different parallelism."""
    concurrency: int = 0
    """Requests in progress."""
    num_workers: int = 0
    """Of the whole pool."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    answer: Answer
    advice: str
    reasons: tuple[str, ...]
    against: tuple[str, ...]
    conditions: tuple[str, ...]


def verdict(setting: Setting, link: Link, hints: Hints) -> Verdict:
    """For one link between the workers."""
    stops = _stops(hints)
    reasons, against = _of_pauses(setting, hints)
    if hints.has_different_tp:
        reasons.append("prefill and decode want different parallelism: in one pool they share one")
    is_narrow, on_path, conditions = _of_path(setting, link, hints)
    (against if is_narrow else conditions).append(on_path)
    small = 1 < hints.num_workers < SMALL_POOL
    if small:
        against.append(f"{hints.num_workers} workers are few: one phase has a single one, and neither batches well")
    conditions.append(TAILS)
    against = stops + against
    if stops or not (reasons or _is_undecided(hints)):
        return Verdict(Answer.NO, "use chunked prefill in one pool", tuple(reasons), tuple(against), tuple(conditions))
    if not reasons:
        advice = "say what decides: the ITL limit (--itl-slo-ms), bursts (--bursty), different parallelism (--different-tp)"
        return Verdict(Answer.PERHAPS, advice, (), tuple(against), tuple(conditions))
    if is_narrow or small:
        advice = "the reasons are there, something else is not: mend that first, or measure both"
        return Verdict(Answer.PERHAPS, advice, tuple(reasons), tuple(against), tuple(conditions))
    return Verdict(Answer.YES, "part prefill from decode", tuple(reasons), tuple(against), tuple(conditions))


def _is_undecided(hints: Hints) -> bool:
    return not hints.itl_slo_s and (hints.is_bursty or hints.prompt_tokens >= LONG_PROMPT)


def _stops(hints: Hints) -> list[str]:
    found: list[str] = []
    if hints.is_offline:
        found.append("an offline batch has no tails to improve")
    if hints.num_workers == 1:
        found.append("one worker cannot be parted")
    if hints.prompt_tokens <= SHORT_PROMPT and 0 < hints.concurrency <= LOW_CONCURRENCY:
        found.append(
            f"prompts of {hints.prompt_tokens} tokens at {hints.concurrency} in progress are short and few: there is little to keep apart"
        )
    return found


def _of_pauses(setting: Setting, hints: Hints) -> tuple[list[str], list[str]]:
    """For and against."""
    whole, chunked = pause(setting, hints.prompt_tokens), pause(setting, hints.prompt_tokens, BEST_CHUNK)
    shown = f"a prompt of {hints.prompt_tokens:,} tokens pauses a colocated decode for {_ms(whole.longest_s)}"
    in_chunks = f"{_ms(chunked.longest_s)} in chunks of {BEST_CHUNK}"
    if not hints.itl_slo_s:
        return ([f"prompts come in bursts, and {shown} each ({in_chunks})"], []) if hints.is_bursty else ([], [])
    limit = f"the ITL limit of {_ms(hints.itl_slo_s)}"
    if chunked.longest_s > hints.itl_slo_s:
        return [f"{shown}, {in_chunks}: no chunk keeps {limit}"], []
    if whole.longest_s <= hints.itl_slo_s:
        return [], [f"{shown}, which keeps {limit}"]
    if hints.is_bursty:
        return [f"{shown}; {in_chunks} keep {limit}, yet in a burst every step carries one"], []
    return [], [f"{shown}; {in_chunks}, which keep {limit}, so chunked prefill in one pool may do"]


def _of_path(setting: Setting, link: Link, hints: Hints) -> tuple[bool, str, list[str]]:
    """Whether the path is too narrow, what to say of it, and what follows for short prompts."""
    at = hand_over(setting, hints.prompt_tokens, link)
    path = link.bytes_per_s * setting.num_links
    shown = f"{link.name}{f' x {setting.num_links}' if setting.num_links > 1 else ''}"
    share = f"the hand-over takes {at.share:.1%} of prefill on the wire, and layer by layer {at.exposed_share:.1%} of it stays exposed"
    least = shortest_prompt(setting, link, SMALL_SHARE, max(setting.shape.max_len, hints.prompt_tokens))
    follows: list[str] = []
    if least is not None and least > _NEGLIGIBLE_PROMPT:
        follows.append(f"prompts below {least:,} tokens wait more than {SMALL_SHARE:.0%} of their prefill: compute those where they decode")
    if at.exposed_share > SMALL_SHARE:
        return True, f"over {shown} {share}", follows
    if path >= WIDE_BYTES_PER_S:
        return False, f"{shown} is wide enough: {share}", follows
    fp8 = "" if setting.dtype.has_scales else "; fp8 KV halves it"
    narrow = "100 Gb/s or less" if path <= NARROW_BYTES_PER_S else "less than 200 Gb/s"
    return False, f"{shown}, {narrow}, so the ratio decides: {share}{fp8}", follows


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.1f} ms"
