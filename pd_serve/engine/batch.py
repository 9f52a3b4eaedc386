"""Plain data between the scheduler (which decides) and the runner (which computes). Frozen; crosses the control/engine thread boundary.

Pure: no torch here, so that the simulator runs the scheduler without it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import msgspec

from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams, TokenLogprobs


class Phase(Enum):
    """Which kernels compute a token: the client's prompt is prefilled, what was generated is decoded, also when it is computed again."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample the token after an entry's last position."""

    params: SamplingParams
    position: int
    """Absolute index of the token to sample (= tokens before it): the counter of the random generator."""
    num_output_tokens: int
    """Tokens generated before it, over all attempts."""
    prompt_ids: tuple[int, ...] = ()
    """Only where a penalty needs them, else empty."""
    output_ids: tuple[int, ...] = ()
    """Only where a penalty or a grammar needs them, else empty."""
    eos_masked: bool = False
    """min_tokens not reached: end-of-sequence and stop tokens may not be sampled, unless a grammar leaves nothing else."""

    @property
    def masks_ends(self) -> bool:
        """A grammar's mask sees to that itself."""
        return self.eos_masked and self.params.grammar is None


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence's share of a step."""

    attempt_id: AttemptId
    phase: Phase
    token_ids: tuple[int, ...]
    """The tokens to compute in this step."""
    start: int
    """Absolute position of the first of them: their KV goes to positions start .. start + len(token_ids) - 1."""
    block_table: tuple[int, ...]
    """Physical block of each logical block, long enough for the last position."""
    sample: SampleSpec | None
    """None where more of the prompt, or of what was generated before a move, is still to be computed."""


@dataclass(frozen=True, slots=True)
class Batch:
    step_id: int
    entries: tuple[BatchEntry, ...]
    """Decoding sequences first, then chunks of prompts."""
    has_push: bool = False
    """Some entry is pushed layer by layer: the runner must call on_layer."""

    @property
    def num_tokens(self) -> int:
        return sum(len(entry.token_ids) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class SampledToken:
    attempt_id: AttemptId
    token_id: int
    logprobs: TokenLogprobs | None
    is_cut: bool = False
    """The answer cannot go on, and is not whole: this token ends it as its last possible one would."""


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    sampled: tuple[SampledToken, ...]
    """One for each entry with a SampleSpec, in entry order."""
    started_at: float
    """Monotonic seconds, this process."""
    ended_at: float


def without_grammars(batch: Batch) -> Batch:
    """For those who do not sample; itself where there are none."""
    if not any(entry.sample is not None and entry.sample.params.grammar is not None for entry in batch.entries):
        return batch
    return replace(batch, entries=tuple(map(_without_grammar, batch.entries)))


def _without_grammar(entry: BatchEntry) -> BatchEntry:
    if entry.sample is None or entry.sample.params.grammar is None:
        return entry
    params = msgspec.structs.replace(entry.sample.params, grammar=None)
    return replace(entry, sample=replace(entry.sample, params=params, output_ids=()))
