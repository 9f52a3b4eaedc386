"""What the server says: complete answers, and the parts that stream chunks share with them.

Stream chunks are written by router/sse.py from prepared bytes; `ChatChunk` and `CompletionChunk` state their shape.
Source: https://platform.openai.com/docs/api-reference (chat, completions, models).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ResponseModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    reasoning_tokens: int


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="Where reasoning is told apart")


class TopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(ResponseModel):
    content: tuple[TokenLogprob, ...]
    refusal: None = None


class CompletionLogprobs(ResponseModel):
    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...] | None
    text_offset: tuple[int, ...]


class CalledFunction(ResponseModel):
    name: str
    arguments: str = Field(description="JSON, unless the answer was cut short")


class ToolCall(ResponseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where there is none beside calls or reasoning")
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: tuple[ToolCall, ...] | None = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: Literal["default"]
    choices: tuple[ChatChoice, ...]
    usage: Usage


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str


class Completion(ResponseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[CompletionChoice, ...]
    usage: Usage


class FunctionDelta(ResponseModel):
    name: str | None = None
    """In the first delta of a call only."""
    arguments: str


class ToolCallDelta(ResponseModel):
    index: int
    id: str | None = None
    """As its type: in the first delta of a call only."""
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(ResponseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: Literal["default"]
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None


class CompletionChunkChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionChunk(ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[CompletionChunkChoice, ...]
    usage: Usage | None = None


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pd-serve"
    max_model_len: int | None = None


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class TokenizeAnswer(ResponseModel):
    """As vLLM's /tokenize."""

    count: int
    max_model_len: int
    """0: no worker has said yet."""
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeAnswer(ResponseModel):
    """As vLLM's /detokenize."""

    prompt: str


class VersionAnswer(ResponseModel):
    version: str
