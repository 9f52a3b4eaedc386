"""What clients say of tools: their definitions, the choice among them, and the calls and results of a conversation so far.

Functions with JSON schema parameters are served; other kinds of tools (`custom`, and what OpenAI hosts) and the older
`functions` are refused.
Source: https://platform.openai.com/docs/guides/function-calling; https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from pd_serve.grammar.base import WHITESPACE, Grammar, GrammarKind
from pd_serve.protocol.openai_formats import AskedForm

MAX_TOOLS = 128
MAX_CALLS = 1024
"""Of one message of the conversation."""
_NO_PARAMETERS: Mapping[str, JsonValue] = {"type": "object", "properties": {}}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class ToolModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionDefinition(ToolModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = Field(None, description="JSON schema of an object; none: it takes no arguments")
    strict: bool | None = Field(None, description="Where `tool_choice` asks for a call, whether all of the schema must be kept")


class FunctionTool(ToolModel):
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, JsonValue]:
        """As chat templates expect it."""
        function: dict[str, JsonValue] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @property
    def num_chars(self) -> int:
        """Of what chat templates show of it."""
        return len(json.dumps(self.for_template(), ensure_ascii=False))

    @property
    def parameters(self) -> dict[str, JsonValue]:
        """JSON schema of the arguments."""
        return dict(_NO_PARAMETERS) if self.function.parameters is None else self.function.parameters


class NamedFunction(ToolModel):
    name: str = Field(max_length=64)


class NamedToolChoice(ToolModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[tuple[FunctionTool, ...], Field(fail_fast=True)]


class CalledFunction(BaseModel):
    """As an answer gave it; what client libraries add to it is dropped."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    arguments: str = Field(description="JSON")


class CalledTool(BaseModel):
    """A call in an assistant's message of the conversation; as CalledFunction."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def arguments(self) -> dict[str, JsonValue] | None:
        """None: they are no JSON object."""
        try:
            value = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


CalledTools = Annotated[tuple[CalledTool, ...], Field(fail_fast=True, max_length=MAX_CALLS)]


def forced_form(tools: tuple[FunctionTool, ...], choice: ToolChoice | None, is_parallel: bool) -> AskedForm | None:
    """The answer that `choice` asks for where it asks for calls, whatever format the model would write them in; None: it may do without.

    A function that is named: its arguments. Otherwise a list of calls, `[{"name": ..., "arguments": ...}, ...]`.
    """
    if isinstance(choice, NamedToolChoice):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        rules = ["start: args_0"]
    elif choice == "required":
        chosen = list(tools)
        calls = " | ".join(f"call_{index}" for index in range(len(chosen)))
        more = '(", " call)*' if is_parallel else ""
        rules = [f'start: "[" call {more} "]"', f"call: {calls}"]
        rules += [f'call_{index}: {_begun(tool)} args_{index} "}}"' for index, tool in enumerate(chosen)]
    else:
        return None
    rules += [f"args_{index}: %json {_schema(tool)}" for index, tool in enumerate(chosen)]
    return AskedForm(Grammar(GrammarKind.GRAMMAR, "\n".join(rules)), "tools")


def _begun(tool: FunctionTool) -> str:
    """A call up to its arguments, as a text of the grammar."""
    return json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')


def _schema(tool: FunctionTool) -> str:
    """What of it cannot be kept is an error where the client is strict, and else left out. GBNF's sign would make the grammar another."""
    options: dict[str, JsonValue] = {"whitespace_pattern": WHITESPACE, "lenient": not tool.function.strict}
    return json.dumps({"type": "object", **tool.parameters, "x-guidance": options}).replace("::=", "\\u003a:=")


def check_tools(tools: tuple[FunctionTool, ...], choice: ToolChoice | None) -> None:
    """What has to fit together. Raises PydanticCustomError naming the parameter, within a model's validator."""
    names = {tool.function.name for tool in tools}
    if len(names) < len(tools):
        raise _refused("tools", "two functions of 'tools' have the same name")
    for position, tool in enumerate(tools):
        if tool.parameters.get("type", "object") != "object":
            raise _refused(f"tools[{position}].function.parameters", "the parameters of a function must be a schema of type 'object'")
    if choice == "required" and not tools:
        raise _refused("tool_choice", "'tool_choice' is only allowed when 'tools' are specified")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise _refused("tool_choice", f"'tool_choice' names the function '{choice.function.name}', which is not in 'tools'")


def _refused(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})
