"""POST /v1/responses: what clients are told. Requests: openai_response_api.py.

Source: https://platform.openai.com/docs/api-reference/responses/object
"""

from __future__ import annotations

from typing import Any, Literal

from pd_serve.protocol.openai_response_api import NamedTool, ResponseTool
from pd_serve.protocol.openai_responses import ResponseModel


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


class FunctionCallItem(ResponseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ReasoningText(ResponseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(ResponseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Literal["in_progress", "completed", "incomplete"]
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...]


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem
Status = Literal["in_progress", "completed", "incomplete"]


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
    output: tuple[OutputItem, ...]
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
    tool_choice: Literal["auto", "none", "required"] | NamedTool
    tools: tuple[ResponseTool, ...]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
