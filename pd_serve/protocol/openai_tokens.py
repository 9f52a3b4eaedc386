"""POST /tokenize and /detokenize: what clients say. Answers: openai_responses.py.

The shapes are those of vLLM, whose clients (and lm-eval's) use them. Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pd_serve.protocol.openai import Message, RequestModel, TokenIds, translated


class TokenizeRequest(RequestModel):
    """Of a text (`prompt`), or of a chat as its template renders it (`messages`)."""

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], Field(fail_fast=True)] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Those that a tokenizer puts around a text; null: of a text yes, of a chat no"
    )
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, bool | int | float | str] = Field({}, max_length=32)

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("refused", "{message}", {"param": "prompt", "message": "give one of 'prompt' and 'messages'"})
        return self


class DetokenizeRequest(RequestModel):
    model: str | None = Field(None, max_length=512)
    tokens: TokenIds


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Raises InvalidRequestError naming the offending parameter."""
    try:
        return TokenizeRequest.model_validate_json(body)
    except ValidationError as error:
        raise translated(error) from None


def parse_detokenize(body: bytes) -> DetokenizeRequest:
    """Raises InvalidRequestError naming the offending parameter."""
    try:
        return DetokenizeRequest.model_validate_json(body)
    except ValidationError as error:
        raise translated(error) from None
