"""A model that knows nothing (random weights, tokens that are bytes) gives answers of the form asked for, wherever they are computed."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pd_serve.clock import MonotonicClock
from pd_serve.engine.grammar import GrammarMasks, TokenSet
from pd_serve.engine.runner import ModelRunner
from pd_serve.engine.scheduler import Scheduler, SchedulerSettings
from pd_serve.engine.sequence import Sequence, SequenceKind
from pd_serve.grammar.base import Grammar, GrammarKind
from pd_serve.grammar.compiler import Vocabulary, problem_of
from pd_serve.ids import AttemptId
from pd_serve.kv.block_pool import BlockPool
from pd_serve.protocol.link import FinishReason
from pd_serve.protocol.sampling import SamplingParams
from tests.accuracy.driver import make_runner
from tests.fakes import EOS_ID, VOCAB_SIZE, write_tokenizer
from tests.unit.engine.random_models import write_random_model

NUM_SCHEMAS = 50
MAX_TOKENS = 600
NO_BLANKS = tuple((4 + ord(blank), -100.0) for blank in " \t\n\r")
"""Where something else may follow: else half of an answer is blanks."""
TOKENS = TokenSet(VOCAB_SIZE, (EOS_ID,))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner[Any]:
    folder = write_tokenizer(tmp_path_factory.mktemp("model"))
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, "max_position_embeddings": 1024, "hidden_size": 64}
    return make_runner(write_random_model(folder, **sizes), "float32", num_blocks=3000)


@dataclass
class Asked:
    grammar: Grammar
    seed: int = 0
    temperature: float = 1.0
    generated: tuple[int, ...] = ()
    """By attempts before."""


@dataclass
class Answer:
    token_ids: tuple[int, ...]
    finish: FinishReason | None

    @property
    def text(self) -> str:
        """Its last token is the end."""
        return bytes(token_id - 4 for token_id in self.token_ids[:-1]).decode()


def answers(runner: ModelRunner[Any], asked: list[Asked], **fields: Any) -> list[Answer]:
    """All in one batch."""
    pool = BlockPool(runner.cache.layout.num_blocks, runner.cache.layout.block_size, prefix_cache=False)
    scheduler = Scheduler(SchedulerSettings(512, 64, 0, frozenset(TOKENS.eos_token_ids), 1024), pool)
    found = {}
    for index, each in enumerate(asked):
        prompt = [4 + (index * 7 + offset) % 256 for offset in range(5)]
        left = MAX_TOKENS - len(each.generated)
        sampling = SamplingParams(max_tokens=left, temperature=each.temperature, seed=each.seed, grammar=each.grammar, **fields)
        scheduler.add(Sequence(AttemptId(index), SequenceKind.LOCAL, prompt + list(each.generated), len(prompt), sampling))
        found[AttemptId(index)] = Answer(each.generated, None)
    step_id = 0
    while len(scheduler):
        batch = scheduler.schedule(step_id).batch
        assert batch is not None
        for update in scheduler.complete(runner.execute(batch)):
            if update.token is not None:
                answer = found[update.attempt_id]
                answer.token_ids += (update.token.token_id,)
                answer.finish = update.finished
            if update.has_left:
                scheduler.release(update.sequence)
        step_id += 1
    return list(found.values())


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Whose values are short, so that a model that says anything comes to an end."""
    kinds = ["string", "integer", "boolean", "enum", "const", "nullable"] + ["object", "array", "anyOf"] * (depth < 3)
    match rng.choice(kinds) if depth else "object":
        case "string":
            return {"type": "string", "minLength": rng.randrange(2), "maxLength": rng.randrange(1, 6)}
        case "integer":
            return {"type": "integer", "minimum": -rng.randrange(50), "maximum": rng.randrange(1, 500)}
        case "nullable":
            return {"type": ["null", "boolean"]}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": rng.sample([1, "a", 'q"', None, True, [1, 2], "été"], 3)}
        case "const":
            return {"const": rng.choice(["x", 12, {"k": [None]}])}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randrange(2), "maxItems": rng.randrange(2, 4)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case _:
            names = rng.sample(["a", "bc", "d e", "ü", "f_g"], rng.randrange(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = [name for name in names if rng.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def of_schema(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def test_every_answer_parses_and_is_valid(runner: ModelRunner[Any]) -> None:
    schemas = [random_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    assert [problem_of(of_schema(schema)) for schema in schemas] == [""] * NUM_SCHEMAS
    found = answers(runner, [Asked(of_schema(schema), seed) for seed, schema in enumerate(schemas)], logit_bias=NO_BLANKS)
    assert {answer.finish for answer in found} == {FinishReason.STOP}
    for seed, (schema, answer) in enumerate(zip(schemas, found, strict=True)):
        try:
            jsonschema.validate(json.loads(answer.text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            raise AssertionError(f"seed {seed}: {answer.text!r} is not of {schema}") from error
    assert len({answer.text for answer in found}) > NUM_SCHEMAS // 2


def test_the_checker_notices_an_answer_without_its_grammar(runner: ModelRunner[Any]) -> None:
    (answer,) = answers(runner, [Asked(Grammar(GrammarKind.REGEX, "(?s:.{0,40})"), 3)])
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(answer.text), random_schema(random.Random(0)))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_expressions_and_choices_are_matched(runner: ModelRunner[Any], temperature: float) -> None:
    expressions = [r"[a-f]{3}\d{2,4}", r"(\+49|0)[1-9]\d{3,7}", "yes|no|maybe", r"[^a-z]{1,9}\.", "(ab|cd){2,5}e?", "x"]
    asked = [Asked(Grammar(GrammarKind.REGEX, expression), seed, temperature) for seed, expression in enumerate(expressions)]
    for expression, answer in zip(expressions, answers(runner, asked), strict=True):
        assert re.fullmatch(expression, answer.text, re.DOTALL), (expression, answer.text)
    lists = [["red", "green", "red green"], ["a", "b"], ['"', "\\", "\n"], ["été"]]
    asked = [Asked(Grammar(GrammarKind.CHOICE, json.dumps(choices)), seed, temperature) for seed, choices in enumerate(lists)]
    for choices, answer in zip(lists, answers(runner, asked), strict=True):
        assert answer.text in choices


def test_a_moved_answer_goes_on_as_it_would_have(runner: ModelRunner[Any]) -> None:
    """On an engine that has not seen the grammar before, with as many tokens as it had: the first one alone is a hand-over from prefill."""
    undisturbed = [Asked(of_schema(random_schema(random.Random(seed))), seed, temperature=(0.0, 1.0)[seed % 2]) for seed in range(4)]
    whole = answers(runner, undisturbed, logit_bias=NO_BLANKS)
    for share in (0.0, 0.7):
        vocabulary = runner.grammars
        assert vocabulary is not None
        runner.grammars = GrammarMasks(vocabulary._open_vocabulary, TOKENS, 2, MonotonicClock())
        moved = []
        for asked, answer in zip(undisturbed, whole, strict=True):
            count = max(1, int(share * (len(answer.token_ids) - 1)))
            moved.append(Asked(asked.grammar, asked.seed, asked.temperature, answer.token_ids[:count]))
        assert answers(runner, moved, logit_bias=NO_BLANKS) == whole


def test_min_tokens_and_ignore_eos_let_an_answer_go_on_as_long_as_it_can(runner: ModelRunner[Any]) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[ab]{1,30}")
    for fields, least in (({"min_tokens": 20}, 20), ({"ignore_eos": True}, 31), ({"min_tokens": 500}, 31)):
        for answer in answers(runner, [Asked(grammar, seed, 5.0) for seed in range(4)], **fields):
            assert answer.finish is FinishReason.STOP
            assert len(answer.token_ids) >= least
            assert set(answer.text) <= {"a", "b"}


def test_a_grammar_that_fails_is_cut_and_the_others_go_on(runner: ModelRunner[Any]) -> None:
    damaged = Grammar(GrammarKind.REGEX, "(a")
    cut, fine = answers(runner, [Asked(damaged), Asked(Grammar(GrammarKind.REGEX, "abc"))])
    assert (cut.token_ids, cut.finish) == ((EOS_ID,), FinishReason.LENGTH)
    assert (fine.text, fine.finish) == ("abc", FinishReason.STOP)


def test_a_model_without_texts_has_no_grammars(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
    assert make_runner(write_random_model(tmp_path, **sizes), "float32", num_blocks=8).grammars is None
    assert isinstance(Vocabulary.of_folder(write_tokenizer(tmp_path), VOCAB_SIZE, (EOS_ID,)), Vocabulary)
