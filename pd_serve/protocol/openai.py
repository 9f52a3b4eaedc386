"""What clients say: the request side of the OpenAI API, as far as it is served, and the shape of errors. Answers: openai_responses.py.

Unknown fields are refused with the field named; fields that OpenAI knows and this server does not serve are refused unless they hold the
value that means "off". Extensions common among open servers: top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids,
chat_template_kwargs, and max_tokens on chat.
Source: https://platform.openai.com/docs/api-reference (chat, completions, models).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pd_serve.errors import InvalidRequestError, PdServeError, RequestError
from pd_serve.protocol.openai_formats import AskedForm, FormFields
from pd_serve.protocol.openai_tools import MAX_TOOLS, CalledTools, ToolChoice, Tools, check_tools, forced_form

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 16384
"""Characters; bounds the text that is held back. Like MAX_STOP_STRINGS and MAX_LOGIT_BIAS, the most a router can be configured to take."""
MAX_LOGPROBS_CHAT = 20
MAX_LOGPROBS_COMPLETION = 5
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 16384
MAX_PROMPTS = 256
MAX_TEMPLATE_KWARGS = 32
MAX_PARTS = 4096
"""Of the content of one message."""

_OFF: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}
"""Fields that OpenAI knows and this server does not, with the values that ask for nothing; null always does."""

_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention")
"""Hints that change no answer."""


def describe_screening(schema: dict[str, Any], model: type[SampledRequest]) -> None:
    """Adds to a model's JSON schema what `_screen` takes besides its fields: nulls, hints, and what asks for nothing."""
    properties = schema["properties"]
    properties["logit_bias"]["propertyNames"] = {"pattern": "^[0-9]{1,9}$"}
    properties["stop"] = {"anyOf": [{"type": "string", "maxLength": MAX_STOP_STRING_LENGTH}, properties["stop"]]}
    for name, of in properties.items():
        if name not in schema["required"] and {"type": "null"} not in of.get("anyOf", ()):
            properties[name] = {"anyOf": [*of.get("anyOf", [of]), {"type": "null"}]}
    for name in model.ignored:
        properties[name] = {"description": "Changes nothing"}
    for name, values in model.off.items():
        if name not in model.model_fields:
            properties[name] = {"enum": [*values, None], "description": "Not served: only what asks for nothing is taken"}


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StreamOptions(RequestModel):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Elsewhere it is true by default; here deltas are padded for those who ask."""


class SampledRequest(RequestModel):
    """What all endpoints that generate share."""

    model_config = ConfigDict(json_schema_extra=describe_screening)
    off: ClassVar[Mapping[str, tuple[object, ...]]] = _OFF
    why_not: ClassVar[Mapping[str, str]] = {}
    """For some of `off`, words of their own."""
    ignored: ClassVar[tuple[str, ...]] = _IGNORED

    model: str = Field(max_length=512)
    stream: bool = False
    temperature: float = Field(1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=2**31, description="0 or -1: the whole vocabulary")
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0, allow_inf_nan=False)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]] = Field({}, max_length=MAX_LOGIT_BIAS)
    stop: Annotated[tuple[Annotated[str, Field(max_length=MAX_STOP_STRING_LENGTH)], ...], Field(fail_fast=True)] = Field(
        (), max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True)] = Field((), max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, data: object) -> object:
        """Drops nulls and hints; refuses what OpenAI serves and this server does not."""
        if not isinstance(data, dict):
            return data
        kept: dict[object, object] = {}
        for name, value in data.items():
            if value is None or name in cls.ignored:
                continue
            if name in cls.off and name not in cls.model_fields:
                if not any(value == off and type(value) is type(off) for off in cls.off[name]):
                    raise _refused(name, cls.why_not.get(name, f"'{name}' is not supported by this server"))
                continue
            kept[name] = value
        return kept

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_tuple(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop", mode="after")
    @classmethod
    def _drop_empty_stops(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(stop for stop in value if stop)


class GenerationRequest(SampledRequest, FormFields):
    """What chat and completions share."""

    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=1024)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self

    @property
    def include_obfuscation(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_obfuscation

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


TextParts = Annotated[tuple[TextPart, ...], Field(fail_fast=True, max_length=MAX_PARTS)]


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | TextParts | None = Field(None, description="May be absent, or null, only where there are `tool_calls`")
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: CalledTools | None = None
    reasoning_content: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: object = Field(None, description="Changes nothing")
    parsed: object = Field(None, description="Changes nothing")

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def num_chars(self) -> int:
        """Of all that a chat template may show of it."""
        others = len(self.reasoning_content or "") + len(self.name or "")
        return len(self.text) + others + sum([len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ()])


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS_CHAT)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field({}, max_length=MAX_TEMPLATE_KWARGS)
    tools: Tools = Field((), max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        for position, message in enumerate(self.messages):
            if message.content is None and not (message.role == "assistant" and message.tool_calls):
                param = f"messages[{position}].content"
                raise _refused(param, f"Missing required parameter: '{param}'")
        if self.tools or self.tool_choice is not None:
            check_tools(self.tools, self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise _refused("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them")
        return self

    @cached_property
    def form(self) -> AskedForm | None:
        """A call that is asked for goes before all else."""
        return forced_form(self.tools, self.tool_choice, self.parallel_tool_calls) or super().form

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        """As SamplingParams.num_logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else -1


TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True)]
"""The first wrong one is told: an error for each of millions would take minutes to put together."""
Prompt = str | TokenIds | Annotated[tuple[str, ...], Field(fail_fast=True)] | Annotated[tuple[TokenIds, ...], Field(fail_fast=True)]


class CompletionRequest(GenerationRequest):
    prompt: Prompt
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS_COMPLETION)
    echo: bool = False
    best_of: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise _refused("best_of", "'best_of' other than 'n' is not supported by this server")
        if self.echo and self.logprobs is not None:
            raise _refused("echo", "'echo' together with 'logprobs' is not supported by this server")
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise _refused("prompt", f"'prompt' must hold 1 to {MAX_PROMPTS} prompts")
        return self

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, one by one: text, or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return (prompt,)
        if prompt and isinstance(prompt[0], int):
            return (tuple(token for token in prompt if isinstance(token, int)),)
        return tuple(part for part in prompt if not isinstance(part, int))

    @property
    def output_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


def error_body(error: PdServeError) -> ErrorResponse:
    """The OpenAI shape of any error of the tree."""
    status = error.http_status
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    param = error.param if isinstance(error, RequestError) else None
    return ErrorResponse(error=ErrorBody(message=error.message, type=kind, param=param, code=error.code))


def parse_chat(body: bytes) -> ChatCompletionRequest:
    """Raises InvalidRequestError naming the offending parameter."""
    try:
        return ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise translated(error) from None


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequestError naming the offending parameter."""
    try:
        return CompletionRequest.model_validate_json(body)
    except ValidationError as error:
        raise translated(error) from None


def _refused(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{message}", {"param": param, "message": message})


def translated(error: ValidationError) -> InvalidRequestError:
    """Of the first thing that is wrong."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = first.get("ctx", {}).get("param") or _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unrecognized request argument supplied: {param}", param)
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"The body is not valid JSON: {first['msg']}")
    if first["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: '{param}'", param)
    if first["type"] == "refused":
        return InvalidRequestError(first["msg"], param)
    return InvalidRequestError(f"Invalid value for '{param or 'body'}': {first['msg']}", param)


def _path(loc: tuple[int | str, ...]) -> str | None:
    """`messages[0].content` from pydantic's location, without the names of union members."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    for member in (".str", ".int", ".tuple", ".float"):
        path = path.removesuffix(member)
    return path or None
