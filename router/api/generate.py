"""What chat and completions share: the way in, from an HTTP request to a prepared plan."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from pd_serve.config import RouterConfig
from pd_serve.errors import InvalidRequestError, NotFoundError
from pd_serve.protocol.openai import ChatCompletionRequest, GenerationRequest
from pd_serve.protocol.sampling import SamplingParams
from router.admission import Limits, header, read_body
from router.api.glance import check_sizes
from router.exchange import AnswerPlan, ExchangeResponse, PreparedPrompt
from router.services import Services
from router.tokenizer import TextCodec

LONG_TEXT = 2_048
"""Characters in one request from which tokenizing goes to another thread, so that it does not hold up the streams."""

R = TypeVar("R", bound=GenerationRequest)


class GenerationEndpoint(Generic[R]):
    """An ASGI endpoint, so that neither request nor response passes through the framework's argument and response handling: it would cost
    as much as all the rest. Raises every error of the tree that can be known before a worker is asked; the app's handlers answer those.
    """

    def __init__(self, parse: Callable[[bytes], R], plan: Callable[[Services, R], Awaitable[AnswerPlan]]) -> None:
        self._parse = parse
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_at = time.monotonic()
        services: Services = scope["app"].state.services
        services.admission.enter(header(scope, b"authorization"))
        has_begun = False
        try:
            body = await read_body(scope, receive, services.config.router.max_body_bytes)
            check_sizes(body, services.limits(), services.config.router)
            parsed = self._parse(body)
            if parsed.model != services.model_name:
                raise NotFoundError(f"The model `{parsed.model}` does not exist; this server has `{services.model_name}`", "model")
            check_counts(parsed, services.config.router)
            response = ExchangeResponse(services, await self._plan(services, parsed), received_at)
            has_begun = True
        finally:
            if not has_begun:
                services.admission.leave()
        await response(scope, receive, send)


def check_counts(request: GenerationRequest, limits: RouterConfig) -> None:
    """Raises InvalidRequestError for what is more, or longer, than this server was configured to take."""
    if request.n > limits.max_n:
        raise InvalidRequestError(f"'n' may be at most {limits.max_n}", "n")
    if len(request.stop) > limits.max_stop_strings:
        raise InvalidRequestError(f"'stop' may hold at most {limits.max_stop_strings} strings", "stop")
    if any(len(stop) > limits.max_stop_string_length for stop in request.stop):
        raise InvalidRequestError(f"a string of 'stop' may have at most {limits.max_stop_string_length} characters", "stop")
    if len(request.logit_bias) > limits.max_logit_bias:
        raise InvalidRequestError(f"'logit_bias' may name at most {limits.max_logit_bias} tokens", "logit_bias")
    if isinstance(request, ChatCompletionRequest) and len(request.messages) > limits.max_messages:
        raise InvalidRequestError(f"'messages' may hold at most {limits.max_messages} messages", "messages")


async def tokenize(codec: TextCodec, text: str, add_special_tokens: bool, num_chars: int) -> tuple[int, ...]:
    """`num_chars`: of all texts of the request, as many short ones take as long as one that is long."""
    if num_chars < LONG_TEXT:
        return codec.encode(text, add_special_tokens)
    return await asyncio.to_thread(codec.encode, text, add_special_tokens)


def prepared_prompt(
    request: GenerationRequest, limits: Limits, token_ids: tuple[int, ...], wanted: int | None, num_logprobs: int
) -> PreparedPrompt:
    """Checks lengths and token ids, and resolves the sampling parameters of each choice; the seed is drawn here if none was given."""
    max_tokens = limits.output_budget(len(token_ids), wanted)
    if request.min_tokens > max_tokens:
        raise InvalidRequestError(f"'min_tokens' is more than the {max_tokens} tokens that may be generated", "min_tokens")
    for param, ids in (("logit_bias", tuple(request.logit_bias)), ("stop_token_ids", request.stop_token_ids)):
        if any(token_id >= limits.vocab_size for token_id in ids):
            raise InvalidRequestError(f"'{param}' holds a token id that is not below the vocabulary size of {limits.vocab_size}", param)
    seed = secrets.randbits(63) if request.seed is None else request.seed
    samplings = tuple(
        SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(0, request.top_k),
            min_p=request.min_p,
            seed=(seed + index) % 2**63,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=tuple(sorted(request.logit_bias.items())),
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            num_logprobs=num_logprobs,
        )
        for index in range(request.n)
    )
    return PreparedPrompt(token_ids, samplings, takes_what_fits=wanted is None)


def new_response_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def now_s() -> int:
    """Seconds since the epoch, for `created` only."""
    return int(time.time())
