"""Calls that are asked for: what the grammar lets a model write, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.grammar.compiler import Vocabulary, problem_of
from pd_serve.protocol.openai_tools import FunctionTool, NamedFunction, NamedToolChoice, ToolChoice, forced_form
from tests.fakes import EOS_ID, VOCAB_SIZE, byte_ids, write_tokenizer

CITY = {"type": "string", "enum": ["Paris", "Rome"], "description": "which ::= what"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": CITY},
}
TOOLS = tuple(
    FunctionTool.model_validate({"type": "function", "function": function})
    for function in ({"name": "get_weather", "parameters": SCHEMA}, {"name": "now", "strict": True}, {"name": "any", "parameters": {}})
)
NAMED = NamedToolChoice(type="function", function=NamedFunction(name="get_weather"))
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder: Path = write_tokenizer(tmp_path_factory.mktemp("model"))
    return Vocabulary.of_folder(folder, VOCAB_SIZE, (EOS_ID,))


@pytest.mark.parametrize(
    ("choice", "is_parallel", "good", "bad"),
    [
        (
            "required",
            True,
            [f"[{PARIS}]", f"[{NOW}, {PARIS}, {NOW}]", '[{"name": "any", "arguments": {"x": 1}}]'],
            ["[]", PARIS, "<tool_call>"],
        ),
        ("required", False, [f"[{PARIS}]"], [f"[{PARIS}, {NOW}]", PARIS.replace("Paris", "Bonn"), "[" + NOW.replace("now", "then") + "]"]),
        (NAMED, True, ['{"city": "Rome"}', '{ "city" : "Paris" }'], ['{"city": "Bonn"}', "{}", '{"city": "Rome", "x": 1}', f"[{PARIS}]"]),
    ],
)
def test_only_such_calls_can_be_written(
    vocabulary: Vocabulary, choice: ToolChoice, is_parallel: bool, good: list[str], bad: list[str]
) -> None:
    form = forced_form(TOOLS, choice, is_parallel)
    assert form is not None
    assert problem_of(form.grammar) == ""
    for texts, is_good in ((good, True), (bad, False)):
        for text in texts:
            matcher = vocabulary.matcher(form.grammar)
            matcher.consume((*byte_ids(text), EOS_ID))
            assert (matcher.problem == "") is is_good, (text, matcher.problem)


def test_where_none_is_asked_for_any_text_will_do() -> None:
    assert forced_form(TOOLS, "auto", True) is None
    assert forced_form(TOOLS, "none", True) is None
    assert forced_form(TOOLS, None, True) is None
