"""The response object as it grows, and the items in it. Used by api/responses.py whole; streamed by response_events.py."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pd_serve.errors import PdServeError
from pd_serve.protocol.openai_response_answers import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ReasoningTold,
    ResponseFailure,
    ResponseLogprob,
    ResponseLogprobTop,
    ResponseObject,
    ResponseUsage,
    Status,
)
from pd_serve.protocol.openai_response_api import ResponseRequest
from router.choice import Piece, chat_logprobs
from router.response_items import id_kind, read_items
from router.tokenizer import TextCodec
from router.whole import UsageCounts


@dataclass(frozen=True, slots=True)
class ResponseDraft:
    """What is known of an answer before its first token."""

    key: str
    created: int
    model: str
    asked: ResponseRequest

    @property
    def response_id(self) -> str:
        return f"resp_{self.key}"

    def item_id(self, kind: str, index: int) -> str:
        return f"{kind}_{self.key}{index:04x}"

    def begun(self) -> ResponseObject:
        return self._told("in_progress")

    def failed(self, error: PdServeError) -> ResponseObject:
        return self._told("failed").model_copy(update={"error": ResponseFailure(message=error.message)})

    def ended(self, output: tuple[OutputItem, ...], has_run_out: bool, usage: UsageCounts) -> ResponseObject:
        """`has_run_out`: of tokens it may generate."""
        changes: dict[str, object] = {"output": output, "usage": _usage(usage)}
        if has_run_out:
            changes["incomplete_details"] = IncompleteDetails()
        else:
            changes["completed_at"] = int(time.time())
        return self._told("incomplete" if has_run_out else "completed").model_copy(update=changes)

    def items(self, codec: TextCodec, pieces: list[Piece], has_run_out: bool) -> tuple[OutputItem, ...]:
        """Of a whole answer. The last one is what was under way when the tokens ran out."""
        made: list[OutputItem] = []
        items = read_items(pieces)
        for index, item in enumerate(items):
            status: Status = "incomplete" if has_run_out and index + 1 == len(items) else "completed"
            logprobs = response_logprobs(codec, item.pieces) if self.asked.has_logprobs else ()
            made.append(item.made(self.item_id(id_kind(item.kind), index), status, logprobs))
        return tuple(made)

    def _told(self, status: str) -> ResponseObject:
        asked = self.asked
        return ResponseObject.model_validate(
            {
                "id": self.response_id,
                "created_at": self.created,
                "status": status,
                "instructions": asked.instructions,
                "max_output_tokens": asked.max_output_tokens,
                "model": self.model,
                "output": (),
                "parallel_tool_calls": asked.parallel_tool_calls,
                "prompt_cache_key": asked.prompt_cache_key,
                "reasoning": ReasoningTold(effort=asked.reasoning.effort),
                "safety_identifier": asked.safety_identifier,
                "temperature": asked.temperature,
                "text": asked.text.model_dump(by_alias=True, exclude_none=True),
                "tool_choice": asked.tool_choice,
                "tools": asked.tools,
                "top_logprobs": asked.top_logprobs,
                "top_p": asked.top_p,
                "usage": None,
                "user": asked.user,
                "metadata": asked.metadata,
            }
        )


def response_logprobs(codec: TextCodec, pieces: list[Piece]) -> tuple[ResponseLogprob, ...]:
    return tuple(
        ResponseLogprob(
            token=named.token,
            logprob=named.logprob,
            bytes=named.bytes,
            top_logprobs=tuple(ResponseLogprobTop(token=top.token, logprob=top.logprob, bytes=top.bytes) for top in named.top_logprobs),
        )
        for named in chat_logprobs(codec, pieces).content
    )


def _usage(usage: UsageCounts) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
