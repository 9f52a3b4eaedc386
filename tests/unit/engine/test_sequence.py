"""What ends a sequence, and what its sampler is told."""

from __future__ import annotations

from pd_serve.engine.sequence import Sequence, SequenceKind, StopRules
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import FinishReason
from pd_serve.protocol.sampling import SamplingParams

RULES = StopRules(frozenset({2}), max_model_len=20)


def make(num_tokens: int = 5, num_prompt: int | None = None, **sampling: object) -> Sequence:
    params = SamplingParams(**({"max_tokens": 10} | sampling))  # type: ignore[arg-type]
    return Sequence(AttemptId(1), SequenceKind.LOCAL, list(range(10, 10 + num_tokens)), num_prompt or num_tokens, params)


def test_end_of_sequence_stops() -> None:
    assert make().append(2, RULES) is FinishReason.STOP


def test_end_of_sequence_as_first_and_only_allowed_token_is_a_stop_not_a_length() -> None:
    assert make(max_tokens=1).append(2, RULES) is FinishReason.STOP


def test_ignored_end_of_sequence_goes_on_but_a_stop_token_still_stops() -> None:
    sequence = make(ignore_eos=True, stop_token_ids=(9,))
    assert sequence.append(2, RULES) is None
    assert sequence.append(9, RULES) is FinishReason.STOP


def test_end_of_sequence_named_as_stop_token_stops_even_when_ignored_as_end() -> None:
    assert make(ignore_eos=True, stop_token_ids=(2,)).append(2, RULES) is FinishReason.STOP


def test_nothing_stops_before_min_tokens() -> None:
    sequence = make(min_tokens=2, stop_token_ids=(9,))
    assert sequence.sample_spec().eos_masked
    assert sequence.append(2, RULES) is None
    assert sequence.append(9, RULES) is None
    assert not sequence.sample_spec().eos_masked
    assert sequence.append(2, RULES) is FinishReason.STOP


def test_min_tokens_counts_over_all_attempts() -> None:
    assert make(num_tokens=5, num_prompt=3, min_tokens=2).append(2, RULES) is FinishReason.STOP


def test_budget_counts_from_this_attempt() -> None:
    sequence = make(num_tokens=5, num_prompt=3, max_tokens=2)
    assert sequence.append(7, RULES) is None
    assert sequence.append(7, RULES) is FinishReason.LENGTH


def test_model_length_ends_a_sequence() -> None:
    sequence = make(num_tokens=18)
    assert sequence.append(7, RULES) is None
    assert sequence.append(7, RULES) is FinishReason.LENGTH
    assert len(sequence.token_ids) == RULES.max_model_len


def test_sampler_is_given_history_only_where_a_penalty_needs_it() -> None:
    assert make(num_tokens=5, num_prompt=3).sample_spec().output_ids == ()
    spec = make(num_tokens=5, num_prompt=3, repetition_penalty=1.1).sample_spec()
    assert (spec.prompt_ids, spec.output_ids) == ((10, 11, 12), (13, 14))
    assert (spec.position, spec.num_output_tokens) == (5, 2)


def test_an_end_that_a_grammar_let_through_ends_whatever_else_was_asked() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    sequence = make(num_tokens=5, num_prompt=3, ignore_eos=True, min_tokens=9, grammar=grammar)
    spec = sequence.sample_spec()
    assert (spec.prompt_ids, spec.output_ids) == ((), (13, 14)), "what a matcher is made of"
    assert spec.eos_masked
    assert not spec.masks_ends
    assert sequence.append(2, RULES) is FinishReason.STOP
