"""POST /v1/responses: what clients say. A request is served as the chat that it amounts to: `ResponseChat` carries both.

Answers: openai_response_answers.py.

Nothing is stored: `store`, `previous_response_id` and `conversation` are refused, each answer stands alone.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, ValidationError, field_validator

from pd_serve.errors import InvalidRequestError, RequestError
from pd_serve.protocol.openai import (
    MAX_LOGPROBS_CHAT,
    MAX_PARTS,
    ChatCompletionRequest,
    RequestModel,
    SampledRequest,
    translated,
)
from pd_serve.protocol.openai_tools import MAX_TOOLS

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Parameters of the chat, and what they are called here."""


class TextContent(RequestModel):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: object = None
    logprobs: object = None
    """These two come with parts of earlier answers, and change nothing."""


def _parts(value: object) -> object:
    return ({"type": "input_text", "text": value},) if isinstance(value, str) else value


TextContents = Annotated[
    tuple[TextContent, ...],
    Field(fail_fast=True, max_length=MAX_PARTS),
    BeforeValidator(_parts, json_schema_input_type=str | Annotated[tuple[TextContent, ...], Field(max_length=MAX_PARTS)]),
]


class InputMessage(RequestModel):
    """As a client writes one, or as it stands in the `output` of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContents
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.content])


def _items(value: object) -> object:
    return ({"role": "user", "content": value},) if isinstance(value, str) else value


class InputCall(RequestModel):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(RequestModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextContents
    id: str | None = None
    status: str | None = None


class InputReasoning(RequestModel):
    """Reasoning of an earlier answer: chat templates leave out what is over, so that it changes nothing."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: object = None
    content: object = None
    encrypted_content: str | None = None
    status: str | None = None


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"{kind} item" if kind in ("function_call", "function_call_output", "reasoning") else "message item"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message item")]
    | Annotated[InputCall, Tag("function_call item")]
    | Annotated[InputCallOutput, Tag("function_call_output item")]
    | Annotated[InputReasoning, Tag("reasoning item")],
    Discriminator(_kind),
]
"""The tags are no identifiers: an error names the place of an item, not its kind."""
InputItems = Annotated[
    tuple[InputItem, ...], Field(fail_fast=True), BeforeValidator(_items, json_schema_input_type=str | tuple[InputItem, ...])
]


class ResponseTool(RequestModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class NamedTool(RequestModel):
    type: Literal["function"]
    name: str


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    """A JSON Schema: passed on as it is."""
    description: str | None = None
    strict: bool | None = None


class PlainFormat(RequestModel):
    type: Literal["text", "json_object"] = "text"


class TextConfig(RequestModel):
    format: PlainFormat | JsonSchemaFormat = PlainFormat()
    verbosity: str | None = None


class ReasoningConfig(RequestModel):
    effort: str | None = None
    summary: None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool = False


class ResponseRequest(SampledRequest):
    off: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }
    why_not: ClassVar[Mapping[str, str]] = {
        "store": "Responses are not stored by this server: leave 'store' out, or false",
        "previous_response_id": "Responses are not stored by this server: instead of 'previous_response_id' send the whole input",
        "conversation": "Conversations are not stored by this server: instead of 'conversation' send the whole input",
    }
    ignored: ClassVar[tuple[str, ...]] = ("prompt_cache_options", "prompt_cache_retention")

    input: InputItems = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...], Field(fail_fast=True)] = Field(
        (), max_length=8
    )
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS_CHAT)
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[tuple[ResponseTool, ...], Field(fail_fast=True)] = Field((), max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field({}, max_length=MAX_METADATA)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("text", mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def chat_fields(self) -> dict[str, object]:
        """As the body of a chat."""
        messages = self._messages()
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields: dict[str, object] = {name: getattr(self, name) for name in SampledRequest.model_fields if name in self.model_fields_set}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.stream and self.stream_options is not None:
            fields["stream_options"] = {"include_obfuscation": self.stream_options.include_obfuscation}
        if isinstance(self.text.format, JsonSchemaFormat):
            form = self.text.format
            schema = {"name": form.name, "schema": form.schema_, "description": form.description, "strict": form.strict}
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {name: value for name, value in schema.items() if value is not None},
            }
        elif self.text.format.type == "json_object":
            fields["response_format"] = {"type": "json_object"}
        if self.tools:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in self.tools
            ]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        if self.tools or self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool):
            choice = self.tool_choice
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice
        return fields | {"reasoning_effort": self.reasoning.effort, "verbosity": self.text.verbosity}

    def _messages(self) -> list[dict[str, object]]:
        """Calls join the assistant's message before them, as a chat has them."""
        messages: list[dict[str, object]] = []
        calls: list[dict[str, object]] | None = None
        for item in self.input:
            if isinstance(item, InputCall):
                if calls is None:
                    calls = []
                    if not (messages and messages[-1]["role"] == "assistant"):
                        messages.append({"role": "assistant", "content": None})
                    messages[-1]["tool_calls"] = calls
                calls.append({"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}})
            elif isinstance(item, InputCallOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": "".join([part.text for part in item.output])})
                calls = None
            elif isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": item.text})
                calls = None
        return messages


class ResponseChat(ChatCompletionRequest):
    """The chat that a request amounts to."""

    asked: ResponseRequest


def parse_response(body: bytes) -> ResponseChat:
    """Raises InvalidRequestError naming the offending parameter."""
    try:
        asked = ResponseRequest.model_validate_json(body)
    except ValidationError as error:
        raise translated(error) from None
    try:
        return ResponseChat.model_validate(asked.chat_fields() | {"asked": asked})
    except ValidationError as error:
        told = translated(error)
        raise InvalidRequestError(renamed(told.message, told.param), _own_name(told.param)) from None


def renamed(message: str, param: str | None) -> str:
    """What is wrong with the chat, in the words of this endpoint."""
    own = _own_name(param)
    return message if param is None or own is None else message.replace(f"'{param}", f"'{own}")


def as_response_error(error: RequestError) -> RequestError:
    """The same error, naming the parameter as it is called here."""
    error.param = _own_name(error.param)
    return error


def _own_name(param: str | None) -> str | None:
    name = (param or "").replace("[", ".").partition(".")[0]
    return param if param is None or name not in _NAMES else _NAMES[name] + param[len(name) :]
