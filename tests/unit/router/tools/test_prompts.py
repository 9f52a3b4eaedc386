"""Conversations with tools as prompts, and which formats are told from a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.config import ModelConfig
from pd_serve.errors import InvalidRequestError
from pd_serve.ids import AttemptId
from pd_serve.protocol.link import FinishReason, TokenOutput
from pd_serve.protocol.openai import ChatCompletionRequest, Message, parse_chat
from pd_serve.protocol.openai_tools import FunctionTool
from router.chat_template import ChatTemplate
from router.tokenizer import FolderTokenizer
from router.tools.parts import WholeAnswer, whole_answer
from router.tools.registry import FORMATS, OutputFormats
from tests.fakes import CHAT_TEMPLATE, VOCAB_SIZE, byte_ids, write_tokenizer

FUNCTION: dict[str, object] = {
    "name": "get_weather",
    "description": "Weather, {now}",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
WEATHER: dict[str, object] = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
CONVERSATION = (
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
)


def messages(*fields: dict[str, object]) -> tuple[Message, ...]:
    return tuple(Message.model_validate(field) for field in fields or CONVERSATION)


def tools(*fields: dict[str, object]) -> tuple[FunctionTool, ...]:
    return tuple(FunctionTool.model_validate(field) for field in fields or (WEATHER,))


def rendered(template: str, tool_template: str | None = None, with_tools: bool = True) -> str:
    return ChatTemplate(template, tool_template, {}).render(messages(), tools() if with_tools else (), {})


def test_a_template_gets_tools_as_schemas_and_calls_as_objects() -> None:
    shown = {name: value for name, value in FUNCTION.items() if name != "strict"}
    assert rendered("{{ tools | tojson }}") == json.dumps([{"type": "function", "function": shown}])
    assert rendered("{{ tools is none }}", with_tools=False) == "True"
    assert rendered("{{ messages[1].tool_calls[0].function.arguments.city }}{{ tools[0].function.name }}") == "Parisget_weather"
    assert rendered("{{ tools[1:] }}{{ messages[1].tool_calls[0].function.arguments | tojson }}") == '[]{"city": "Paris"}'
    assert rendered("{{ 'content' in messages[1] }}{{ messages[2].tool_call_id }}{{ tools[1:] }}") == "Falsecall_1[]"


def test_a_template_that_puts_arguments_into_its_text_gets_json() -> None:
    """DeepSeek's: it also asks whether the content is null."""
    template = (
        "{{ tools[1:] }}{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
        "{% for tool in message['tool_calls'] %}{{ tool['function']['name'] + '\\n' + tool['function']['arguments'] + '\\n' }}{% endfor %}"
        "{% else %}{{ '<' + message['content'] + '>' }}{% endif %}{% endfor %}"
    )
    call = 'get_weather\n{"city": "Paris"}\n'
    assert rendered(template) == f"[]<Weather?>{call}{call}<sun><rain>"
    assert rendered("{{ tools[1:] }}{{ 'x' ~ messages[1].tool_calls[0].function.arguments }}") == '[]x{"city": "Paris"}'


def test_a_template_of_its_own_for_tools_is_taken_where_there_are_some() -> None:
    assert rendered("plain", "tools {{ tools | length }}") == "tools 1"
    assert rendered("plain {{ tools }}", "tools", with_tools=False) == "plain None"


def test_a_template_that_does_not_know_tools_is_told_of_them_in_words() -> None:
    prompt = rendered(CHAT_TEMPLATE)
    system, user, assistant, results, _ = prompt.split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather", "description": "Weather, {now}"' in system
    assert user == "user\nWeather?<|im_end|>\n"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert assistant == f"assistant\n{call}\n{call}<|im_end|>\n"
    assert results == "user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    with_system = ChatTemplate(CHAT_TEMPLATE, None, {}).render(messages({"role": "system", "content": "Be brief."}), tools(), {})
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert "# Tools" not in rendered(CHAT_TEMPLATE, with_tools=False)


def test_marks_for_training_mean_nothing() -> None:
    assert (
        rendered("{% for m in messages[:1] %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools[1:] }}") == "Weather?[]"
    )


def test_a_template_that_refuses_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no tools here"):
        rendered("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}")


KNOWN = {
    "{{ tools }}<tool_call>": ("hermes", False),
    "{{ tools }}<tool_call><think></think>": ("hermes", True),
    "{{ tools }}<tool_call><function=name>": (None, False),
    "{{ tools }}<|python_tag|>": ("llama3", False),
    "{{ tools }}{{ 'Environment: ipython' }}": ("llama3", False),
    "{{ tools }}[TOOL_CALLS]": ("mistral", False),
    "{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜></think>": ("deepseek", True),
    "{{ tools }}": (None, False),
    CHAT_TEMPLATE: ("hermes", False),
}


@pytest.mark.parametrize(("template", "known"), KNOWN.items(), ids=range(len(KNOWN)))
def test_formats_are_told_from_the_template(tmp_path: Path, template: str, known: tuple[str | None, bool]) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path, template))
    formats = OutputFormats(ModelConfig(), codec)
    assert (formats.tool_format, formats.has_reasoning) == (FORMATS.get(known[0] or ""), known[1])
    chosen = OutputFormats(ModelConfig(tool_parser="mistral", reasoning_parser="none"), codec)
    assert (chosen.tool_format, chosen.has_reasoning) == (FORMATS["mistral"], False)


def asked(**fields: object) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})


def test_what_needs_no_parsing_gets_none(tmp_path: Path) -> None:
    plain = OutputFormats(ModelConfig(), FolderTokenizer(write_tokenizer(tmp_path / "a")))
    assert plain.parsing(asked(), byte_ids("x")) is None
    assert plain.parsing(asked(tools=[WEATHER], tool_choice="none"), byte_ids("x")) is None
    assert plain.parsing(asked(tools=[WEATHER]), byte_ids("x")) is not None
    thinking = OutputFormats(ModelConfig(reasoning_parser="qwen3"), FolderTokenizer(write_tokenizer(tmp_path / "b")))
    assert thinking.parsing(asked(), byte_ids("...<think>\n\n</think>\n\n")) is None
    for tail, is_open in (("<think>\n", True), ("assistant\n", False)):
        parsing = thinking.parsing(asked(), byte_ids("x" * 20 + tail))
        assert parsing is not None
        assert parsing.is_reasoning_open is is_open


def answered(codec: FolderTokenizer, model: ModelConfig, token_ids: list[int]) -> WholeAnswer:
    parsing = OutputFormats(model, codec).parsing(asked(tools=[WEATHER]), byte_ids("x"))
    assert parsing is not None
    text = parsing.text((), 0)
    pieces = [text.push(TokenOutput(AttemptId(1), token_id)) for token_id in token_ids]
    return whole_answer(pieces + text.end(FinishReason.LENGTH))


def test_markers_that_are_special_tokens_are_seen_and_others_are_not(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path, special_tokens=("[TOOL_CALLS]", "[ARGS]", "[INST]")))
    begin, arguments, other = VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2
    tokens = [*byte_ids("ok"), other, begin, *byte_ids("get_weather"), arguments, *byte_ids('{"city": "é"}')]
    answer = answered(codec, ModelConfig(tool_parser="mistral"), tokens)
    assert (answer.content, answer.calls[0].name, answer.calls[0].arguments) == ("ok", "get_weather", '{"city": "é"}')
    assert len(answer.calls[0].call_id) == 9
    assert codec.keeping(("[TOOL_CALLS]",)).decode((*byte_ids("a"), begin, other)) == "a[TOOL_CALLS]"
    assert codec.keeping(("<tool_call>", "absent")) is codec
    assert codec.decode(tuple(tokens)) == 'okget_weather{"city": "é"}'


def test_where_a_grammar_holds_all_is_content(tmp_path: Path) -> None:
    """It leaves no room for the end of reasoning, even where the prompt has opened it."""
    thinking = OutputFormats(ModelConfig(reasoning_parser="deepseek_r1"), FolderTokenizer(write_tokenizer(tmp_path)))
    opened = byte_ids("x<think>\n")
    assert thinking.parsing(asked(), opened) is not None
    assert thinking.parsing(asked(response_format={"type": "json_object"}), opened) is None
    with_tools = thinking.parsing(asked(response_format={"type": "json_object"}, tools=[WEATHER]), opened)
    assert with_tools is not None
    assert not with_tools.has_reasoning


def test_halves_of_characters_in_arguments_do_not_reach_the_tokenizer(tmp_path: Path) -> None:
    codec = FolderTokenizer(write_tokenizer(tmp_path))
    call = {"id": "c", "function": {"name": "get_weather", "arguments": '{"city": "\\ud83d", "joy": "\\ud83d\\ude00"}'}}
    text = codec.render_chat(messages({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}), {})
    assert codec.encode(text, False)
    assert "\ufffd" in text
    assert "\U0001f600" in text


def test_halves_of_characters_in_a_body_are_no_json() -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}]}')


def test_all_that_a_template_shows_counts() -> None:
    assert [message.num_chars for message in messages()] == [8, 2 * len('get_weather{"city": "Paris"}'), 3, 4]
    assert messages({"role": "assistant", "content": "a", "reasoning_content": "bcd", "name": "ef"})[0].num_chars == 6
    assert tools()[0].num_chars > len(json.dumps(FUNCTION["parameters"]))
