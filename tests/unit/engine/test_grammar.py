from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from pd_serve.clock import MonotonicClock
from pd_serve.engine.batch import Batch, BatchEntry, Phase, SampleSpec, without_grammars
from pd_serve.engine.device_sampler import DeviceSampler
from pd_serve.engine.grammar import SPARE_MATCHERS, Constrained, GrammarMasks, TokenMasks, TokenSet
from pd_serve.engine.sampler import Sampler
from pd_serve.errors import ModelError
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.grammar.compiler import Matcher, Vocabulary
from pd_serve.ids import AttemptId
from pd_serve.protocol.sampling import SamplingParams
from tests.fakes import EOS_ID, VOCAB_SIZE, byte_ids, write_tokenizer

TOKENS = TokenSet(VOCAB_SIZE, (EOS_ID,))
STOP_ID = byte_ids("b")[0]
CPU = torch.device("cpu")


@cache
def vocabulary() -> Vocabulary:
    with TemporaryDirectory() as folder:
        return Vocabulary.of_folder(write_tokenizer(Path(folder)), VOCAB_SIZE, (EOS_ID,))


@pytest.fixture
def masks() -> GrammarMasks:
    return GrammarMasks(vocabulary, TOKENS, 1, MonotonicClock())


def spec(regex: str, output: str = "", eos_masked: bool = False, **fields: Any) -> SampleSpec:
    params = SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, regex), **fields)
    return SampleSpec(params, 0, len(output), output_ids=byte_ids(output), eos_masked=eos_masked)


def constrained(of: SampleSpec, row: int = 0, attempt: int = 1) -> Constrained:
    assert of.params.grammar is not None
    return Constrained(row, AttemptId(attempt), of.params.grammar, of)


def sets(masks: TokenMasks) -> list[set[int]]:
    return [set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()) for mask in masks.allowed]


def follow(masks: GrammarMasks, *specs: SampleSpec) -> list[set[int]]:
    """After each spec of one attempt."""
    return [sets(masks.begin([constrained(each)]).result(9))[0] for each in specs]


def letters(text: str) -> set[int]:
    return set(byte_ids(text))


def test_masks_follow_the_output(masks: GrammarMasks) -> None:
    assert follow(masks, spec("ab?c"), spec("ab?c", "a"), spec("ab?c", "ab"), spec("ab?c", "abc")) == [
        letters("a"),
        letters("bc"),
        letters("c"),
        {EOS_ID},
    ]


def test_an_attempt_from_elsewhere_goes_on_where_it_was(masks: GrammarMasks) -> None:
    """With one token, as from prefill; with many, as when moved; and with what is not what was here."""
    assert follow(masks, spec("abcd", "a"), spec("abcd", "abc"), spec("abcd", "ab"), spec("xy", "x")) == [
        letters("b"),
        letters("d"),
        letters("c"),
        letters("y"),
    ]


def test_each_row_has_its_own(masks: GrammarMasks) -> None:
    asked = [constrained(spec("a*"), row=4, attempt=7), constrained(spec("[bc]d", "b"), row=1, attempt=8)]
    for way in (masks, GrammarMasks(vocabulary, TOKENS, 2, MonotonicClock())):
        found = way.begin(asked).result(9)
        assert found.rows == (4, 1)
        assert sets(found) == [letters("a") | {EOS_ID}, letters("d")]


def test_matchers_that_were_let_go_are_made_again(masks: GrammarMasks) -> None:
    for attempt in range(SPARE_MATCHERS + 3):
        masks.begin([constrained(spec("ab"), attempt=attempt)]).result(9)
    assert sets(masks.begin([constrained(spec("ab", "a"), attempt=0)]).result(9)) == [letters("b")]


@pytest.mark.parametrize(
    ("fields", "before", "after"),
    [
        ({}, letters("ab") | {EOS_ID}, {EOS_ID}),
        ({"eos_masked": True}, letters("ab"), {EOS_ID}),
        ({"eos_masked": True, "stop_token_ids": (STOP_ID,)}, letters("a"), {EOS_ID}),
        ({"stop_token_ids": (STOP_ID,)}, letters("ab") | {EOS_ID}, {EOS_ID}),
        ({"ignore_eos": True}, letters("ab"), {EOS_ID}),
    ],
)
def test_ends_are_held_back_while_there_is_another_way(
    masks: GrammarMasks, fields: dict[str, Any], before: set[int], after: set[int]
) -> None:
    assert follow(masks, spec("x[ab]?", "x", **fields), spec("x[ab]?", "xa", **fields)) == [before, after]


def test_a_grammar_that_cannot_be_followed_ends_its_answer_alone(masks: GrammarMasks) -> None:
    asked = [constrained(spec("ab", "zz"), 0, 1), constrained(spec("ab"), 1, 2), constrained(spec("(a"), 2, 3)]
    found = masks.begin(asked).result(9)
    assert sets(found) == [{EOS_ID}, letters("a"), {EOS_ID}]
    assert found.broken == {0, 2}


def test_without_a_vocabulary_the_answer_ends() -> None:
    def missing() -> Vocabulary:
        raise ModelError("no tokenizer.json")

    found = GrammarMasks(missing, TOKENS, 1, MonotonicClock()).begin([constrained(spec("ab"))]).result(9)
    assert (sets(found), set(found.broken)) == ([{EOS_ID}], {0})


def test_whatever_goes_wrong_with_one_grammar_the_step_goes_on() -> None:
    class Fallible(Vocabulary):
        def matcher(self, grammar: Grammar) -> Matcher:
            if grammar.text == "bad":
                raise IndexError("string index out of range")
            return vocabulary().matcher(grammar)

    masks = GrammarMasks(lambda: Fallible.__new__(Fallible), TOKENS, 1, MonotonicClock())
    found = masks.begin([constrained(spec("bad"), 0, 1), constrained(spec("ab"), 1, 2)]).result(9)
    assert (sets(found), set(found.broken)) == ([{EOS_ID}, letters("a")], {0})


def test_a_grammar_is_compiled_before_it_is_needed_and_the_vocabulary_read_once() -> None:
    reads: list[str] = []
    is_read = threading.Event()

    def read() -> Vocabulary:
        reads.append(threading.current_thread().name)
        is_read.set()
        return vocabulary()

    masks = GrammarMasks(read, TOKENS, 1, MonotonicClock())
    assert not reads
    grammar = spec("ab").params.grammar
    assert grammar is not None
    masks.prepare(grammar)
    assert is_read.wait(9)
    masks.prepare(Grammar(GrammarKind.REGEX, "other"))
    assert follow(masks, spec("ab")) == [letters("a")]
    assert len(reads) == 1
    assert reads[0].startswith("grammar-compile")


# ---- applied to logits


def logits(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).to(dtype) * 3


def test_the_two_ways_to_forbid_are_one() -> None:
    rng = np.random.default_rng(5)
    masks = TokenMasks((2, 0), rng.integers(0, 256, (2, 36), dtype=np.uint8))
    here, there = logits(4), logits(4)
    masks.forbid(here)
    masks.forbid_there(there)
    assert torch.equal(here, there)
    bits = np.unpackbits(masks.allowed, axis=1, bitorder="little")[:, :VOCAB_SIZE].astype(bool)
    assert (here[2].isfinite().numpy() == bits[0]).all()
    assert (here[0].isfinite().numpy() == bits[1]).all()
    assert torch.equal(here[[1, 3]], logits(4)[[1, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_sampled_token_is_allowed_whatever_is_in_the_batch(masks: GrammarMasks, temperature: float, dtype: torch.dtype) -> None:
    fields: dict[str, Any] = {"temperature": temperature, "num_logprobs": 2, "logit_bias": ((STOP_ID, 100.0), (byte_ids("q")[0], -100.0))}
    held = spec("[qz]+", "q", seed=9, repetition_penalty=1.4, **fields)
    free = SampleSpec(SamplingParams(max_tokens=9, **fields), 0, 0)
    raw = logits(3, dtype)
    kept = raw.clone()

    def sampled(rows: Sequence[int], specs: Sequence[SampleSpec], sampler: Sampler | DeviceSampler) -> Any:
        row = next(index for index, each in enumerate(specs) if each is held)
        found = masks.begin([constrained(held, row)]).result(9)
        return sampler.sample(raw[list(rows)], specs, found)[row]

    for sampler in (Sampler((EOS_ID,)), DeviceSampler((EOS_ID,), CPU)):
        alone = sampled([1], [held], sampler)
        among = sampled([0, 1, 2], [free, held, free], sampler)
        assert alone.token_id == among.token_id
        assert alone.token_id in letters("qz")
        expected = torch.log_softmax(raw[1].float(), -1)
        assert alone.logprobs.chosen == pytest.approx(float(expected[alone.token_id]), abs=1e-5), "of the raw distribution"
        assert alone.logprobs.top_ids == tuple(expected.topk(2).indices.tolist())
    assert torch.equal(raw, kept), "the logits are the graph's"


def test_a_bias_does_not_get_past_the_grammar(masks: GrammarMasks) -> None:
    wanted = spec("[ab]", temperature=0.0, logit_bias=((byte_ids("z")[0], 100.0), (byte_ids("b")[0], 50.0)))
    (choice,) = Sampler((EOS_ID,)).sample(logits(1), [wanted], masks.begin([constrained(wanted)]).result(9))
    assert choice.token_id == byte_ids("b")[0]


def test_followers_are_not_told_of_grammars() -> None:
    free = BatchEntry(AttemptId(1), Phase.DECODE, (1,), 0, (0,), SampleSpec(SamplingParams(max_tokens=1), 1, 1, output_ids=(1,)))
    held = BatchEntry(AttemptId(2), Phase.DECODE, (1,), 0, (1,), spec("a", "a"))
    more = BatchEntry(AttemptId(3), Phase.PREFILL, (1,), 0, (2,), None)
    batch = Batch(1, (free, held, more))
    told = without_grammars(batch)
    assert told.entries[0] is free
    assert told.entries[2] is more
    assert told.entries[1].sample is not None
    assert (told.entries[1].sample.params.grammar, told.entries[1].sample.output_ids) == (None, ())
    assert without_grammars(Batch(1, (free, more))).entries == (free, more)
