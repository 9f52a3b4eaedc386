from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from pd_serve.errors import ModelError
from pd_serve.grammar.base import ANY_JSON_OBJECT, Grammar, GrammarKind
from pd_serve.grammar.compiler import MaskExecutor, Matcher, Vocabulary, has_vocabulary, mask_nbytes, problem_of
from tests.fakes import EOS_ID, VOCAB_SIZE, byte_ids, write_tokenizer

PROPERTIES = '"properties":{"name":{"type":"string"},"age":{"type":"integer"}}'
PERSON = f'{{"type":"object",{PROPERTIES},"required":["name","age"],"additionalProperties":false}}'


@cache
def vocabulary() -> Vocabulary:
    with TemporaryDirectory() as folder:
        return Vocabulary.of_folder(write_tokenizer(Path(folder)), VOCAB_SIZE, (EOS_ID,))


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(mask_nbytes(VOCAB_SIZE), np.uint8)
    matcher.write_mask(mask)
    return set(np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE].nonzero()[0].tolist())


def takes(grammar: Grammar, text: str) -> bool:
    """Token by token, each of them allowed, and then the end."""
    matcher = vocabulary().matcher(grammar)
    for token_id in byte_ids(text):
        if token_id not in allowed(matcher):
            return False
        matcher.consume((token_id,))
    return EOS_ID in allowed(matcher) and not matcher.problem


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.JSON_SCHEMA, PERSON, '{"name": "Ada",\n "age":36}', '{"name": "Ada"}'),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","maxLength":2}', '"ab"', '"abc"'),
        (GrammarKind.JSON_SCHEMA_LOOSE, '{"type":"integer","not":{"const":1}}', "1", "x"),
        (GrammarKind.REGEX, r"[a-z]{2}-\d+", "ab-12", "ab-"),
        (GrammarKind.CHOICE, '["a","ab","say \\"no\\"\\n"]', 'say "no"\n', "b"),
        (GrammarKind.CHOICE, '["été","☃"]', "☃", "ete"),
        (GrammarKind.GRAMMAR, 'start: "(" start ")" | "x"', "((x))", "((x)"),
        (GrammarKind.GRAMMAR, 'root ::= "n" [0-9]+', "n1", "n"),
    ],
)
def test_exactly_what_matches_is_let_through(kind: GrammarKind, text: str, good: str, bad: str) -> None:
    grammar = Grammar(kind, text)
    assert problem_of(grammar) == ""
    assert takes(grammar, good)
    assert not takes(grammar, bad)


def test_any_object_is_an_object_and_nothing_else() -> None:
    assert takes(ANY_JSON_OBJECT, '{"a": [1, {"b": null}]}')
    assert not takes(ANY_JSON_OBJECT, "[1]")


def test_blanks_do_not_go_on_for_ever() -> None:
    assert not takes(Grammar(GrammarKind.JSON_SCHEMA, PERSON), "{" + " " * 41 + '"name":"","age":1}')


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type":"objec"}', "Invalid type"),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","not":{"const":"a"}}', "not"),
        (GrammarKind.JSON_SCHEMA, '{"type":', "EOF"),
        (GrammarKind.JSON_SCHEMA, "[1]", "object"),
        (GrammarKind.JSON_SCHEMA, '{"$ref":"https://example.org/x"}', "https://example.org/x"),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"("}', "unclosed"),
        (GrammarKind.REGEX, "(a", "unclosed"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.GRAMMAR, "start: nowhere", "nowhere"),
        (GrammarKind.GRAMMAR, "root ::= (", "GBNF"),
    ],
)
def test_what_is_wrong_is_told(kind: GrammarKind, text: str, words: str) -> None:
    assert words in problem_of(Grammar(kind, text))
    assert vocabulary().matcher(Grammar(kind, text)).problem


HOSTILE = [
    Grammar(GrammarKind.REGEX, "(a{1,30000}){1,30000}"),
    Grammar(GrammarKind.REGEX, "(.*a.{30}){30}"),
    Grammar(GrammarKind.REGEX, "(" * 20_000 + ")" * 20_000),
    Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","minItems":1000000,"items":{"type":"string","minLength":1000000}}'),
    Grammar(GrammarKind.JSON_SCHEMA, '{"$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/a"}]}},"$ref":"#/$defs/a"}'),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"value {index}" for index in range(4000)]})),
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"anyOf": [{"properties": {f"k{i}": {}}} for i in range(3)]}] * 12})),
    Grammar(GrammarKind.GRAMMAR, 'start: a\na: a a a | "x" |'),
    Grammar(GrammarKind.GRAMMAR, "root ::= " + "(" * 5_000),
    Grammar(GrammarKind.GRAMMAR, 'start: "x"{1,100000000}'),
]


@pytest.mark.parametrize("grammar", HOSTILE, ids=lambda grammar: grammar.text[:24])
def test_a_hostile_grammar_ends_and_leaves_a_way_on(grammar: Grammar) -> None:
    problem_of(grammar)
    matcher = vocabulary().matcher(grammar)
    for _ in range(20):
        tokens = allowed(matcher)
        assert tokens, "always something, if only the end"
        matcher.consume((max(tokens),))


def test_a_matcher_that_fails_lets_only_the_end_follow() -> None:
    matcher = vocabulary().matcher(Grammar(GrammarKind.REGEX, "ab"))
    matcher.consume(byte_ids("x"))
    assert "x" in matcher.problem
    assert allowed(matcher) == {EOS_ID}


def test_a_copy_goes_its_own_way() -> None:
    first = vocabulary().matcher(Grammar(GrammarKind.REGEX, "ab|cd"))
    second = first.copy()
    first.consume(byte_ids("a"))
    second.consume(byte_ids("c"))
    assert (allowed(first), allowed(second)) == (set(byte_ids("b")), set(byte_ids("d")))
    assert (first.num_consumed, second.num_consumed) == (1, 1)


def test_several_masks_at_once_are_those_one_by_one() -> None:
    matchers = [vocabulary().matcher(Grammar(GrammarKind.REGEX, text)) for text in ("a", "[b-z]", ".*")]
    together = np.zeros((4, mask_nbytes(VOCAB_SIZE)), np.uint8)
    MaskExecutor(2).write_masks([(matcher, row) for row, matcher in zip((3, 0, 1), matchers, strict=True)], together)
    alone = np.zeros_like(together)
    for row, matcher in zip((3, 0, 1), matchers, strict=True):
        matcher.write_mask(alone[row])
    assert np.array_equal(together, alone)
    assert not together[2].any()


def test_a_folder_without_texts_is_told(tmp_path: Path) -> None:
    assert not has_vocabulary(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Vocabulary.of_folder(tmp_path, VOCAB_SIZE, (EOS_ID,))
    (tmp_path / "tokenizer.json").write_text("{")
    assert has_vocabulary(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Vocabulary.of_folder(tmp_path, VOCAB_SIZE, (EOS_ID,))
    with pytest.raises(ModelError, match="end-of-sequence"):
        Vocabulary.of_folder(write_tokenizer(tmp_path), VOCAB_SIZE, ())


def test_a_model_may_have_more_tokens_than_its_tokenizer(tmp_path: Path) -> None:
    """Padding of the vocabulary never follows."""
    padded = Vocabulary.of_folder(write_tokenizer(tmp_path), 300, (EOS_ID,))
    mask = np.zeros(mask_nbytes(300), np.uint8)
    padded.matcher(Grammar(GrammarKind.REGEX, "(?s:.*)")).write_mask(mask)
    bits = np.unpackbits(mask, bitorder="little")[:300]
    assert bits[EOS_ID]
    assert not bits[VOCAB_SIZE:].any()
