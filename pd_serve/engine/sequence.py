"""One attempt's tokens and blocks on this worker. Pure; owned by the machine on the control thread, changed by the scheduler.

    token_ids = original prompt | output of earlier attempts | output of this attempt
                '-- num_prompt_tokens --'
                '------------- num_initial_tokens -----------'

Everything that influences sampling is counted over all attempts (position, num_output_tokens), so that a moved request goes on as if
nothing had happened; only the budget (max_tokens) counts from this attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pd_serve.engine.batch import SampleSpec
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import FinishReason
from pd_serve.protocol.sampling import SamplingParams


class SequenceKind(Enum):
    LOCAL = "local"
    """Prompt and output are computed here."""
    PREFILL_ONLY = "prefill_only"
    """The prompt is computed here and pushed elsewhere; ends with its first sampled token."""
    DECODE = "decode"
    """The prompt's KV has arrived from elsewhere, with the first token."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a sequence besides its own sampling parameters."""

    eos_token_ids: frozenset[int]
    max_model_len: int
    """Longest prompt + output, tokens."""


@dataclass(slots=True, eq=False)
class Sequence:
    attempt_id: AttemptId
    kind: SequenceKind
    token_ids: list[int]
    num_prompt_tokens: int
    """Length of the client's prompt: without outputs of earlier attempts."""
    sampling: SamplingParams
    owner: object = None
    """Opaque to the scheduler: whatever the machine finds its own record of the attempt by."""
    block_table: list[int] = field(default_factory=list)
    """Physical block of each logical block; one pool reference each, held by whoever holds the sequence."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the block table (cached, computed or received)."""
    num_cached_tokens: int = 0
    """Of these, how many were not computed for this attempt."""
    order: int = -1
    """Arrival at the scheduler: larger is younger. Set by the scheduler."""
    num_initial_tokens: int = field(init=False)
    prompt_done: bool = field(init=False, default=False)
    _is_penalized: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.sampling
        self._is_penalized = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.num_initial_tokens = len(self.token_ids)
        self.prompt_done = self.kind is SequenceKind.DECODE

    @property
    def num_output_tokens(self) -> int:
        """Generated over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def max_total_tokens(self, rules: StopRules) -> int:
        """Length at which the sequence ends for certain."""
        return min(self.num_initial_tokens + self.sampling.max_tokens, rules.max_model_len)

    def append(self, token_id: int, rules: StopRules) -> FinishReason | None:
        """Add a generated token; the reason if it is the last. Precedence: a stop token stops even at the length limit."""
        stops_allowed = self.num_output_tokens >= self.sampling.min_tokens
        self.token_ids.append(token_id)
        if stops_allowed:
            if token_id in self.sampling.stop_token_ids:
                return FinishReason.STOP
            if token_id in rules.eos_token_ids and not self.sampling.ignore_eos:
                return FinishReason.STOP
        if self.sampling.grammar is not None and token_id in rules.eos_token_ids:
            # Sampled only where the answer may end, and held back until it must where min_tokens or ignore_eos ask for more.
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_total_tokens(rules):
            return FinishReason.LENGTH
        return None

    def sample_spec(self) -> SampleSpec:
        """How to sample the token after the last one."""
        params, num_output_tokens = self.sampling, self.num_output_tokens
        penalized = self._is_penalized
        needs_outputs = penalized or params.grammar is not None
        return SampleSpec(
            params=params,
            position=len(self.token_ids),
            num_output_tokens=num_output_tokens,
            prompt_ids=tuple(self.token_ids[: self.num_prompt_tokens]) if penalized else (),
            output_ids=tuple(self.token_ids[self.num_prompt_tokens :]) if needs_outputs else (),
            eos_masked=num_output_tokens < params.min_tokens,
        )
