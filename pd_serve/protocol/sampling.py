"""How the next token is chosen: resolved by the router, obeyed by whichever worker samples. Floor 2, crosses every process."""

from __future__ import annotations

from math import inf, isfinite

import msgspec

from pd_serve.grammar.base import Grammar


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every field is concrete when it leaves the router (the seed is drawn there), so that a moved attempt samples the same tokens.

    Randomness is counter-based, keyed by (seed, absolute position of the sampled token), never by batch or step.
    """

    max_tokens: int
    """Tokens still to generate in this attempt, the first one included."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence besides the model's end-of-sequence ids; the stop token itself is reported, finish reason stop."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Generated tokens (over all attempts) before which end-of-sequence and stop tokens are masked out."""
    num_logprobs: int = -1
    """-1: none. 0: of the chosen token only. n: of the n likeliest as well."""
    grammar: Grammar | None = None
    """What the answer must match, over all attempts; None: any text. An end is sampled only where it may end, and then ends it."""

    def problem(self, vocab_size: int) -> str:
        """Why no token can be sampled by these; empty when one can. Asked by every worker: one such request would end a whole step."""
        finite = (self.temperature, self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(map(isfinite, finite)) or self.temperature < 0:
            return "temperature, penalties and biases must be finite"
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k < 0 or not 0 < self.repetition_penalty < inf:
            return "top_p, top_k, min_p or repetition_penalty out of range"
        if self.max_tokens < 1 or self.min_tokens < 0 or not 0 <= self.seed < 2**63 or not -1 <= self.num_logprobs <= vocab_size:
            return "max_tokens, min_tokens, seed or num_logprobs out of range"
        if not all(0 <= token_id < vocab_size for token_id in (*self.stop_token_ids, *(token_id for token_id, _ in self.logit_bias))):
            return "stop_token_ids or logit_bias name a token that is not in the vocabulary"
        return ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Natural-log probabilities of one sampled position, of the raw model distribution (before temperature, penalties and filters)."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()
    """Descending; top_ids beside it."""
