"""Calls as models write them, well and badly: what is read of them, and that nothing is lost."""

from __future__ import annotations

import json

import pytest

from router.tools.parts import CallArguments, CallBegun
from tests.unit.router.tools.answers import RECORDED, Recorded, pushed, read, told


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())
def test_recorded_answers_are_read(recorded: Recorded) -> None:
    assert told(read(recorded.form, [recorded.text])) == (recorded.content, recorded.calls)


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())
def test_a_call_begins_with_its_name_and_arguments_come_as_they_are_written(recorded: Recorded) -> None:
    parts = pushed(recorded.form, list(recorded.text))
    begun = [part for part in parts if isinstance(part, CallBegun)]
    assert [(part.index, part.call_id) for part in begun] == [(index, f"call_{index}") for index in range(len(recorded.calls))]
    for index, (_, arguments) in enumerate(recorded.calls):
        pieces = [part.text for part in parts if isinstance(part, CallArguments) and part.index == index]
        json.loads("".join(pieces))
        if not recorded.text.startswith('<tool_call>\n{"arguments"'):
            assert len(pieces) == len(arguments)


NO_CALLS = {
    "no JSON": ("hermes", "<tool_call>\n{name: 'x'}\n</tool_call> after"),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "empty name": ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    "a list of arguments": ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    "a text of arguments that is no object": ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
    "cut in the name": ("hermes", '<tool_call>\n{"name": "get_we'),
    "cut in the marker": ("hermes", "2 < 3 and <tool_ca"),
    "braces twice": ("hermes", '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'),
    "an object of another kind": ("llama3", '{"name": "Bob", "parameters": {"age": 3}}'),
    "JSON behind text": ("llama3", 'Here: {"name": "add", "parameters": {}}'),
    "a tool of Meta's": ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    "an empty list": ("mistral", "[TOOL_CALLS] []"),
    "a name only": ("mistral", "[TOOL_CALLS]get_weather"),
    "no separator": ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function add {}<｜tool▁call▁end｜>"),
    "another kind": ("deepseek", "<｜tool▁call▁begin｜>code<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜>"),
    "a name without end": ("deepseek", "<｜tool▁call▁begin｜>" + "x" * 1000),
    "trailing space": ("mistral", "  just text \n\n"),
}


@pytest.mark.parametrize(("form", "text"), NO_CALLS.values(), ids=NO_CALLS.keys())
def test_what_is_no_call_is_content_to_the_letter(form: str, text: str) -> None:
    assert told(read(form, [text])) == (text, ())


def test_a_marker_within_what_is_no_call_is_found() -> None:
    text = '<tool_call><tool_call>{"name": "add", "arguments": {}}</tool_call> done'
    assert told(read("hermes", [text])) == ("<tool_call> done", (("add", "{}"),))


def test_a_call_that_breaks_off_keeps_its_beginning_and_the_rest_is_content() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": x}}</tool_call>'
    assert told(read("hermes", [broken])) == ("x}}</tool_call>", (("add", '{"a": '),))
    assert told(read("hermes", ['<tool_call>{"name": "add", "arguments": {"a": "lo'])) == ("", (("add", '{"a": "lo'),))


def test_what_stands_behind_a_call_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call> ok'
    assert told(read("hermes", [text])) == ("}</tool_call> ok", (("add", '{"a": 1}'),))
    assert told(read("llama3", ['{"name": "add", "parameters": {}} ok'])) == (" ok", (("add", "{}"),))


def test_line_breaks_within_strings_are_escaped() -> None:
    call = read("hermes", ['<tool_call>{"name": "add", "arguments": {"code": "a\n\tb\\n\\u00e9"}}</tool_call>']).calls[0]
    assert json.loads(call.arguments) == {"code": "a\n\tb\né"}


@pytest.mark.parametrize(
    ("arguments", "told_as"), [('"{\\"a\\": 1}"', '{"a": 1}'), ('""', "{}"), ("null", "{}"), ('{ "a" : [ ] }', '{ "a" : [ ] }')]
)
def test_arguments_in_other_shapes(arguments: str, told_as: str) -> None:
    text = f'<tool_call>{{"name": "add", "id": [1, {{"a": -1.5}}], "arguments": {arguments}, "x": 0.5e-3}}</tool_call>'
    assert told(read("hermes", [text])) == ("", (("add", told_as),))
    assert told(read("hermes", ['<tool_call>{"name": "add"}</tool_call>'])) == ("", (("add", "{}"),))


@pytest.mark.parametrize(
    "value", ["01", "1.", ".5", "+1", "1e", "--1", "tru", "nul", "NaN", "'a'", '"\\x"', '"\\u12g4"', "[1,]", "{1: 2}", "[1"]
)
def test_what_is_no_json_breaks_off(value: str) -> None:
    answer = read("hermes", [f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'])
    assert answer.content
    with pytest.raises(ValueError):
        json.loads(answer.calls[0].arguments)


def test_deep_arguments_break_off() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 5000
    answer = read("hermes", [text])
    assert answer.calls[0].arguments + answer.content == text.removeprefix('<tool_call>{"name": "add", "arguments": ')


def test_no_more_calls_than_asked_for_and_nothing_behind_them() -> None:
    text = RECORDED["Qwen 2.5"].text
    assert told(read("hermes", [text], max_calls=1)) == ("", RECORDED["Qwen 2.5"].calls[:1])
    assert told(read("hermes", list(text), max_calls=1)) == ("", RECORDED["Qwen 2.5"].calls[:1])


@pytest.mark.parametrize("text", [r'{"name": "add", "arguments": "{\"a\": \"\ud83d\"}"}', r'{"name": "a\udc00", "arguments": {}}'])
def test_halves_of_characters_are_no_text_of_a_call(text: str) -> None:
    """They could not be sent."""
    (call,) = read("hermes", [f"<tool_call>{text}</tool_call>"]).calls
    assert "\ufffd" in call.name + call.arguments
    assert (call.name + call.arguments).encode()
