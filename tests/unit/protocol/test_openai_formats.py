from __future__ import annotations

import json
from typing import Any

import pytest

import pd_serve.protocol.openai_formats
from pd_serve.errors import InvalidRequestError
from pd_serve.grammar.base import ANY_JSON_OBJECT, Grammar, GrammarKind
from pd_serve.protocol.openai import parse_chat, parse_completion
from pd_serve.protocol.openai_formats import AskedForm, strict_problem

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def form(**fields: object) -> AskedForm | None:
    asked = parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()).form
    assert parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode()).form == asked
    return asked


def response_format(**named: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **named}}


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_text_asks_for_nothing(value: object) -> None:
    assert form(response_format=value) is None
    assert form() is None


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": response_format(strict=True)}, GrammarKind.JSON_SCHEMA, TEXT, "response_format"),
        ({"response_format": response_format(strict=False)}, GrammarKind.JSON_SCHEMA_LOOSE, TEXT, "response_format"),
        ({"response_format": response_format(description="of it")}, GrammarKind.JSON_SCHEMA_LOOSE, TEXT, "response_format"),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_json": TEXT}, GrammarKind.JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["a", "é"]}, GrammarKind.CHOICE, '["a","é"]', "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.GRAMMAR, 'start: "a"', "guided_grammar"),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, GrammarKind.REGEX, "a+", "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, GrammarKind.REGEX, "a", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarKind.CHOICE, '["a"]', "structured_outputs.choice"),
        (
            {"structured_outputs": {"grammar": "start: x", "json_object": False}},
            GrammarKind.GRAMMAR,
            "start: x",
            "structured_outputs.grammar",
        ),
    ],
)
def test_each_spelling_comes_down_to_a_grammar(fields: dict[str, object], kind: GrammarKind, text: str, param: str) -> None:
    assert form(**fields) == AskedForm(Grammar(kind, text), param)


def test_any_object() -> None:
    assert form(response_format={"type": "json_object"}) == AskedForm(ANY_JSON_OBJECT, "response_format")
    assert form(response_format={"type": "json_schema", "json_schema": {"name": "x"}}) == AskedForm(ANY_JSON_OBJECT, "response_format")
    assert form(structured_outputs={"json_object": True}) == AskedForm(ANY_JSON_OBJECT, "structured_outputs.json_object")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": response_format(name="a b")}, "response_format"),
        ({"response_format": response_format(strict=True, schema={**SCHEMA, "required": ["a"]})}, "response_format"),
        ({"response_format": response_format(strict=True, schema={**SCHEMA, "additionalProperties": True})}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_json": SCHEMA}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": 1}, "guided_json"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        form(**fields)
    assert (refused.value.param or "").startswith(param)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array"}, "'type: \"object\"'"),
        ({}, "'type: \"object\"'"),
        ({**SCHEMA, "additionalProperties": True}, "additionalProperties"),
        ({**SCHEMA, "required": []}, "Missing 'b'"),
        ({**SCHEMA, "properties": {"a": {"type": "object"}, "b": {}}}, "('properties', 'a')"),
        ({**SCHEMA, "$defs": {"d": {"type": "array", "items": {"properties": {}}}}}, "('$defs', 'd', 'items')"),
        ({**SCHEMA, "properties": {"a": {"anyOf": [{}, {"type": "object"}]}, "b": {}}}, "('properties', 'a', 'anyOf', '1')"),
    ],
)
def test_a_strict_schema_leaves_nothing_open(schema: dict[str, Any], words: str) -> None:
    assert words in strict_problem(schema)


def test_a_closed_schema_is_strict() -> None:
    assert strict_problem({**SCHEMA, "properties": {"a": SCHEMA, "b": {"type": "array", "items": SCHEMA}}}) == ""


def test_a_strict_schema_with_many_properties_is_checked_in_proportion() -> None:
    """Counted in comparisons of names: no name is looked for among all the others."""
    num_compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [f"k{index}" for index in range(300)]
    properties: Any = {Name(name): {} for name in names}
    required: Any = [Name(name) for name in names]
    assert strict_problem({"type": "object", "properties": properties, "required": required, "additionalProperties": False}) == ""
    assert num_compared < 10 * len(names)
    assert "k299" in strict_problem({"type": "object", "properties": properties, "required": required[:-1], "additionalProperties": False})
    assert "k0" in strict_problem({"type": "object", "properties": properties, "required": [[], 1], "additionalProperties": False})


def test_of_a_strict_schema_so_many_parts_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_serve.protocol.openai_formats, "MAX_STRICT_PARTS", 100)

    def problem_with(num_parts: int) -> str:
        return strict_problem({"type": "object", "additionalProperties": False, "anyOf": [{} for _ in range(num_parts)]})

    assert problem_with(98) == ""
    assert "at most 100 parts" in problem_with(99)
