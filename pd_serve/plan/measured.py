"""T_P and T_D of a running system, from what its workers and its router count between two looks at their /metrics. Pure.

T_P is prompt tokens computed by the time of steps that computed prompts, T_D tokens decoded by the time of steps that decoded; the gaps
between steps that follow each other count (pd_serve_compute_seconds_total).

They are of an instance while it is busy, so they do not depend on how long it idled. They do depend on the load: decode reads its weights
once for the whole batch, so a small batch says little of what a full one gives. Whether what was seen is a capacity is judged, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pd_serve.plan.errors import PlanError
from pd_serve.protocol.link import Role

BUSY_SHARE = 0.8
"""A prefill worker that computes so much of the time is near what it can do."""
FULL_SHARE = 0.8
"""So much of the KV pool in use, or of an ITL limit, is near what decode can do."""
MIXED_SHARE = 0.1
"""Of compute time in steps that did both: above, the two cannot be told apart."""

_METRICS = frozenset(
    {
        "pd_serve_compute_seconds_total",
        "pd_serve_computed_tokens_total",
        "pd_serve_step_seconds",
        "pd_serve_blocks",
        "pd_serve_running_sequences",
        "pd_serve_waiting_sequences",
        "pd_serve_prefill_queue_tokens",
        "pd_serve_request_prompt_tokens",
        "pd_serve_request_generated_tokens",
    }
)
_FAMILIES = frozenset(name.removesuffix("_total") for name in _METRICS)
"""As the parser calls them."""
Reading = Mapping[tuple[str, str], float]
"""Of one process: by name and its label, without pd_serve_."""


class WorkerWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker between two looks."""

    worker: str
    role: Role
    prompt_tokens: float
    """Computed, not found in a cache."""
    decode_tokens: float
    prefill_s: float
    """Of steps that computed prompts only; as the next two, of those that decoded only, and of those that did both."""
    decode_s: float
    mixed_s: float
    num_steps: float
    waited_share: float
    """Share of the looks at which prompts or sequences waited in it."""
    kv_share: float
    """Most of its blocks that were in use at any look, those of the prefix cache alone left out."""


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What clients did meanwhile, as the router counts it: choices that ended."""

    num_choices: float
    prompt_tokens: float
    """Mean; 0 where none ended."""
    output_tokens: float


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """T_P or T_D, of the mean instance."""

    tokens_per_s: float
    num_workers: int
    num_tokens: float
    busy_share: float
    """Of the window, mean of the workers."""
    is_capacity: bool
    """What was seen is near what they can do. Otherwise the figure is what they did."""
    words: str
    """Over what load, and why it is a capacity or not."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float
    prefill: Phase | None
    """None: no worker computed prompts apart from decoding."""
    decode: Phase | None
    mean_batch: float
    """Sequences in a step of a worker that decodes; 0 where nothing was decoded."""
    step_s: float
    """Mean step of such a worker, with the gap to the one before: what a client sees between two tokens, at least."""
    seen: Seen
    notes: tuple[str, ...]

    @property
    def is_capacity(self) -> bool:
        """Both figures are."""
        return all(phase is not None and phase.is_capacity for phase in (self.prefill, self.decode))


def read_metrics(text: str) -> dict[tuple[str, str], float]:
    """An exposition. Raises PlanError for what is none."""
    found: dict[tuple[str, str], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.name not in _FAMILIES:
                continue
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    label = next(iter(sample.labels.values()), "")
                    found[(sample.name.removeprefix("pd_serve_"), label)] = sample.value
    except ValueError as error:
        raise PlanError(f"no Prometheus text: {error}") from error
    return found


def worker_window(worker: str, role: Role, looks: Sequence[Reading]) -> WorkerWindow:
    """`looks`: in order, at least two. Raises PlanError where the worker has restarted, or does not count what is needed."""

    def gained(name: str, label: str = "") -> float:
        before, after = (look.get((name, label), 0.0) for look in (looks[0], looks[-1]))
        if after < before:
            raise PlanError(f"{worker} has restarted while it was watched")
        return after - before

    if ("blocks", "free") not in looks[-1]:
        raise PlanError(f"{worker} is no pd-serve worker that has reported: it counts no KV blocks")
    waited = [look for look in looks if look.get(("prefill_queue_tokens", ""), 0.0) or look.get(("waiting_sequences", ""), 0.0)]
    return WorkerWindow(
        worker=worker,
        role=role,
        prompt_tokens=gained("computed_tokens_total", "prefill"),
        decode_tokens=gained("computed_tokens_total", "decode"),
        prefill_s=gained("compute_seconds_total", "prefill"),
        decode_s=gained("compute_seconds_total", "decode"),
        mixed_s=gained("compute_seconds_total", "mixed"),
        num_steps=gained("step_seconds_count"),
        waited_share=len(waited) / len(looks),
        kv_share=max(_kv_share(look) for look in looks),
    )


def seen_by_router(before: Reading, after: Reading) -> Seen:
    prompt, output = (
        (after.get((f"{name}_sum", ""), 0.0) - before.get((f"{name}_sum", ""), 0.0))
        for name in ("request_prompt_tokens", "request_generated_tokens")
    )
    count = after.get(("request_prompt_tokens_count", ""), 0.0) - before.get(("request_prompt_tokens_count", ""), 0.0)
    if count <= 0:
        return Seen(0.0, 0.0, 0.0)
    return Seen(count, prompt / count, output / count)


def measured(windows: Sequence[WorkerWindow], seen: Seen, seconds: float, itl_slo_s: float = 0.0) -> Measured:
    """`itl_slo_s`: steps near it make decode's figure a capacity; 0: none."""
    notes: list[str] = []
    apart: list[WorkerWindow] = []
    for window in windows:
        compute_s = window.prefill_s + window.decode_s + window.mixed_s
        if compute_s and window.mixed_s > MIXED_SHARE * compute_s:
            notes.append(
                f"{window.worker} is left out: {window.mixed_s / compute_s:.0%} of its compute went to steps that did both phases, which "
                "cannot be told apart; measure with one role a worker, and no prompts computed where they decode"
            )
        else:
            apart.append(window)
    prefilling = [window for window in apart if window.prompt_tokens and window.prefill_s >= window.decode_s]
    decoding = [window for window in apart if window.decode_tokens and window.decode_s > window.prefill_s]
    prefill = _prefill(prefilling, seconds) if prefilling else None
    steps, tokens = sum(each.num_steps for each in decoding), sum(each.decode_tokens for each in decoding)
    step_s = sum(_decode_s(each) for each in decoding) / steps if steps else 0.0
    mean_batch = tokens / steps if steps else 0.0
    decode = _decode(decoding, seconds, mean_batch, step_s, itl_slo_s) if decoding else None
    if prefill is not None and prefill.is_capacity and decode is not None and not decode.is_capacity:
        notes.append("prefill holds decode back: for a fuller batch start more of it, or send shorter prompts with longer answers")
    return Measured(
        seconds=seconds,
        prefill=prefill,
        decode=decode,
        mean_batch=mean_batch,
        step_s=step_s,
        seen=seen,
        notes=tuple(notes),
    )


def _prefill(windows: Sequence[WorkerWindow], seconds: float) -> Phase:
    tokens, busy_s = sum(each.prompt_tokens for each in windows), sum(each.prefill_s + each.mixed_s for each in windows)
    busy_share = _busy_share(busy_s, seconds, len(windows))
    waited = sum(each.waited_share for each in windows) / len(windows)
    load = f"{tokens:,.0f} prompt tokens in {seconds:.0f} s, busy {busy_share:.0%} of it, prompts waiting at {waited:.0%} of the looks"
    is_capacity = busy_share >= BUSY_SHARE or waited >= BUSY_SHARE
    if is_capacity:
        return Phase(tokens / busy_s, len(windows), tokens, busy_share, True, f"a capacity, for prompts of these lengths: {load}")
    words = f"a speed, not seen to be a capacity: {load}. It is what they did while they computed, and may fall under full load; send more"
    return Phase(tokens / busy_s, len(windows), tokens, busy_share, False, words)


def _decode(windows: Sequence[WorkerWindow], seconds: float, mean_batch: float, step_s: float, itl_slo_s: float) -> Phase:
    tokens, busy_s = sum(each.decode_tokens for each in windows), sum(_decode_s(each) for each in windows)
    busy_share = _busy_share(busy_s, seconds, len(windows))
    kv_share = max(each.kv_share for each in windows)
    load = (
        f"{tokens:,.0f} tokens in {seconds:.0f} s, busy {busy_share:.0%} of it, {mean_batch:.1f} sequences in a step of {1e3 * step_s:.1f} "
        f"ms, at most {kv_share:.0%} of the KV blocks in use"
    )
    reasons = [
        reason
        for reason, is_so in (
            ("the KV pool was nearly full", kv_share >= FULL_SHARE),
            ("sequences waited", sum(each.waited_share for each in windows) >= FULL_SHARE * len(windows)),
            (f"steps were near the ITL limit of {1e3 * itl_slo_s:.0f} ms", itl_slo_s > 0 and step_s >= FULL_SHARE * itl_slo_s),
        )
        if is_so
    ]
    if reasons:
        return Phase(tokens / busy_s, len(windows), tokens, busy_share, True, f"a capacity ({', '.join(reasons)}): {load}")
    words = (
        f"too low a load to be a capacity: {load}. A fuller batch gives more tokens per second, so N_D comes out too large; send more at "
        "once, or say the ITL limit that steps may take (--itl-slo-ms)"
    )
    return Phase(tokens / busy_s, len(windows), tokens, busy_share, False, words)


def _busy_share(busy_s: float, seconds: float, num_workers: int) -> float:
    """At most 1: workers count a step when it has ended, some of it before the window."""
    return min(1.0, busy_s / (seconds * num_workers))


def _decode_s(window: WorkerWindow) -> float:
    """Steps that did both, few of them, count whole: the figure is rather too low."""
    return window.decode_s + window.mixed_s


def _kv_share(look: Reading) -> float:
    states = dict(_blocks(look))
    total = sum(states.values())
    return (total - states.get("free", 0.0) - states.get("cached", 0.0)) / total if total else 0.0


def _blocks(look: Reading) -> Iterator[tuple[str, float]]:
    return ((label, value) for (name, label), value in look.items() if name == "blocks")
