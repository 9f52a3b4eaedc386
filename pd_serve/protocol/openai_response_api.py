"""POST /v1/responses: what clients say and are told. A request is served as the chat that it amounts to: `ResponseChat` carries both.

Nothing is stored: `store`, `previous_response_id` and `conversation` are refused, each answer stands alone.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from pd_serve.errors import InvalidRequestError, RequestError
from pd_serve.protocol.openai import (
    MAX_LOGPROBS_CHAT,
    ChatCompletionRequest,
    RequestModel,
    SampledRequest,
    translated,
)
from pd_serve.protocol.openai_responses import ResponseModel

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


class InputMessage(RequestModel):
    """As a client writes one, or as it stands in the `output` of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[tuple[TextContent, ...], BeforeValidator(_parts, json_schema_input_type=str | tuple[TextContent, ...])]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.content])


def _items(value: object) -> object:
    return ({"role": "user", "content": value},) if isinstance(value, str) else value


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
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "truncation": ("disabled",),
    }
    why_not: ClassVar[Mapping[str, str]] = {
        "store": "Responses are not stored by this server: leave 'store' out, or false",
        "previous_response_id": "Responses are not stored by this server: instead of 'previous_response_id' send the whole input",
        "conversation": "Conversations are not stored by this server: instead of 'conversation' send the whole input",
    }
    ignored: ClassVar[tuple[str, ...]] = ("prompt_cache_options", "prompt_cache_retention")

    input: Annotated[tuple[InputMessage, ...], BeforeValidator(_items, json_schema_input_type=str | tuple[InputMessage, ...])] = Field(
        min_length=1
    )
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    include: tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content"], ...] = Field((), max_length=8)
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS_CHAT)
    stream_options: ResponseStreamOptions | None = None
    parallel_tool_calls: bool = True
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field({}, max_length=16)
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
        messages = [{"role": message.role, "content": message.text} for message in self.input]
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
        return fields | {"reasoning_effort": self.reasoning.effort, "verbosity": self.text.verbosity}


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


class ResponseLogprobTop(ResponseModel):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ResponseLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[ResponseLogprobTop, ...]


class OutputText(ResponseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[ResponseLogprob, ...] = ()


class OutputMessage(ResponseModel):
    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...]


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int = 0


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(ResponseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningTold(ResponseModel):
    effort: str | None
    summary: None = None


class ResponseObject(ResponseModel):
    """The answer, also as it stands in the events of a stream."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: tuple[OutputMessage, ...]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningTold
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    """As TextConfig."""
    tool_choice: Literal["auto", "none"] = "auto"
    tools: tuple[()] = ()
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
