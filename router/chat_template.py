"""Conversations to prompts: the chat template of a model, rendered as transformers does it, in jinja2's sandbox. Made by the tokenizer.

Messages lose the fields that are null, calls show their arguments as an object, `tools` are JSON schemas or none, `documents` none. To a
template that does not know tools, they are told in words: see _without_tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue

from pd_serve.errors import InvalidRequestError, ModelError
from pd_serve.protocol.openai import Message
from pd_serve.protocol.openai_tools import CalledTool, FunctionTool
from router.surrogates import without_halves

TemplateValue = bool | int | float | str
_PREAMBLE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""Source: the words of Hermes 2 Pro's and Qwen 2.5's templates."""


class ChatTemplate:
    """Raises ModelError from the constructor when a source is no template.

    `tool_source`: of the template used in its place when there are tools, where a model has one.
    """

    def __init__(self, source: str, tool_source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = special_tokens
        self._plain = _compiled(source)
        self._with_tools = self._plain if tool_source is None else _compiled(tool_source)
        self.source = source if tool_source is None else source + tool_source
        self.knows_tools = _knows_tools(source if tool_source is None else tool_source)

    def render(self, messages: tuple[Message, ...], tools: tuple[FunctionTool, ...], template_kwargs: Mapping[str, TemplateValue]) -> str:
        """Raises InvalidRequestError when the template refuses the messages."""
        schemas = [tool.for_template() for tool in tools]
        plain = [_plain(message) for message in messages]
        if not self.knows_tools and (tools or any(message.tool_calls or message.role == "tool" for message in messages)):
            plain = _without_tools(plain, schemas)
        variables = {**self._special_tokens, "tools": schemas or None, "documents": None, "add_generation_prompt": True, **template_kwargs}
        template = self._with_tools if tools else self._plain
        try:
            try:
                return without_halves(str(template.render(messages=plain, **variables)))
            except TemplateError:
                if all("content" in message for message in plain):
                    raise
                # DeepSeek's templates ask whether the content is null, and cannot do without it.
                return without_halves(str(template.render(messages=[{"content": None, **message} for message in plain], **variables)))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError, RecursionError) as error:
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}", "messages") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training: here it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Arguments(dict[str, object]):
    """Of a call. Most templates want an object, but some put it into their text as it stands: to those it is JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"


def _plain(message: Message) -> dict[str, object]:
    plain: dict[str, object] = {"role": message.role}
    if message.content is not None:
        plain["content"] = message.text
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [{"id": call.id, "type": call.type, "function": _called(call)} for call in message.tool_calls]
    return plain


def _called(call: CalledTool) -> dict[str, object]:
    arguments = call.arguments
    return {"name": call.function.name, "arguments": call.function.arguments if arguments is None else _Arguments(arguments)}


def _without_tools(messages: list[dict[str, object]], schemas: list[dict[str, JsonValue]]) -> list[dict[str, object]]:
    """The same conversation for a template that knows messages of text only, in the words of Hermes and Qwen.

    Tools follow the system message, calls the text of theirs; results are what the user says, those that follow each other together.
    """
    told: list[dict[str, object]] = []
    previous = ""
    for message in messages:
        role, content = str(message["role"]), str(message.get("content", ""))
        if role == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if previous == "tool":
                told[-1]["content"] = f"{told[-1]['content']}\n{result}"
            else:
                told.append({"role": "user", "content": result})
        else:
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                called = json.dumps(call["function"], ensure_ascii=False)
                content += ("\n" if content else "") + f"<tool_call>\n{called}\n</tool_call>"
            told.append({**message, "content": content})
        previous = role
    if schemas:
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        preamble = _PREAMBLE.format(tools=lines)
        if told[0]["role"] in ("system", "developer"):
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{preamble}"}
        else:
            told.insert(0, {"role": "system", "content": preamble})
    return told


def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ModelError(f"damaged chat template: {error}") from error


def _knows_tools(source: str) -> bool:
    return "tools" in meta.find_undeclared_variables(_environment().parse(source))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
