"""What chat and completions share: the way in, from an HTTP request to a prepared plan."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from pd_serve.config import RouterConfig
from pd_serve.errors import InvalidRequestError, NotFoundError, UnavailableError
from pd_serve.protocol.openai import ChatCompletionRequest, GenerationRequest
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.server import line_of
from router.admission import Limits, header, read_body
from router.api.glance import LONG_BODY, check_sizes
from router.exchange import AnswerPlan, Exchange, PreparedPrompt
from router.obfuscation import ObfuscatedEvents
from router.request_head import RequestHead, head_of
from router.services import Services
from router.tenants import Ticket
from router.tokenizer import TextCodec

LONG_TEXT = 2_048
"""Characters in one request from which tokenizing goes to another thread, so that it does not hold up the streams."""

_drawing = random.Random(secrets.randbits(256))
"""Response ids and seeds: they have to differ, not to be secret, and drawing them costs no call of the system."""
_PARSED = "pd_serve.parsed"
"""ASGI extension: what at_once has found out of a request that takes a while."""

R = TypeVar("R", bound=GenerationRequest)


class Texts(NamedTuple):
    """What has to be tokenized of a request."""

    texts: tuple[str, ...]
    add_special_tokens: bool

    @property
    def is_long(self) -> bool:
        """Many short ones take as long as one that is long."""
        return sum(map(len, self.texts)) >= LONG_TEXT


class Planner(Protocol[R]):
    """What differs between the endpoints. Each raises the errors of the tree that can be known by then."""

    def parse(self, body: bytes) -> R: ...

    def texts(self, services: Services, request: R) -> Texts: ...

    def plan(self, services: Services, request: R, encoded: tuple[tuple[int, ...], ...]) -> AnswerPlan:
        """`encoded`: the tokens of each of its texts."""
        ...


class GenerationEndpoint(Generic[R]):
    """An endpoint that bypasses the framework's argument and response handling, which would cost as much as all the rest.

    at_once: a request that is there as a whole is prepared and submitted with no task at all
    ASGI:    any other; raises every error of the tree that can be known before a worker is asked, and the app's handlers answer those
    """

    def __init__(self, planner: Planner[R]) -> None:
        self._planner = planner

    def at_once(self, scope: Scope, body: bytes) -> bool:
        """False: it takes a while to prepare; nothing is held for it, and it comes again as ASGI. Raises the errors of the tree."""
        services: Services = scope["app"].state.services
        if len(body) >= LONG_BODY or len(body) > services.config.router.max_body_bytes:
            return False
        received_at = time.monotonic()
        ticket = services.admission.enter(scope)
        has_begun = False
        try:
            parsed = self._parsed(services, body)
            texts = self._planner.texts(services, parsed)
            form = parsed.form
            if texts.is_long or (form is not None and not services.grammars.knows(form)):
                scope["extensions"][_PARSED] = {"request": parsed, "texts": texts}
                services.admission.give_back(ticket, 0)
                return False
            plan = self._plan(services, parsed, _encoded(services.codec, texts))
            head = _admitted(services, scope, ticket, plan)
            has_begun = True
        finally:
            if not has_begun:
                services.admission.leave(ticket)
        Exchange(services, plan, head, line_of(scope), received_at, _nothing).start()
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_at = time.monotonic()
        services: Services = scope["app"].state.services
        ticket = services.admission.enter(scope)
        has_begun = False
        try:
            if known := scope["extensions"].get(_PARSED):
                parsed: R = known["request"]
                texts: Texts = known["texts"]
            else:
                body = await read_body(scope, receive, services.config.router.max_body_bytes)
                check_sizes(body, services.limits(), services.config.router)
                parsed = self._parsed(services, body)
                texts = self._planner.texts(services, parsed)
            if parsed.form is not None:
                try:
                    await services.grammars.check(parsed.form)
                except UnavailableError:
                    services.admission.give_back(ticket, 0)
                    raise
            plan = self._plan(services, parsed, await tokenize(services.codec, texts))
            head = _admitted(services, scope, ticket, plan)
            has_begun = True
        finally:
            if not has_begun:
                services.admission.leave(ticket)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        exchange = Exchange(services, plan, head, line_of(scope), received_at, lambda: None if ended.done() else ended.set_result(None))
        try:
            exchange.start()
            await ended
        finally:
            exchange.abandon()

    def _plan(self, services: Services, request: R, encoded: tuple[tuple[int, ...], ...]) -> AnswerPlan:
        plan = self._planner.plan(services, request, encoded)
        if plan.events is not None and request.include_obfuscation:
            plan = plan._replace(events=ObfuscatedEvents(plan.events))
        return plan

    def _parsed(self, services: Services, body: bytes) -> R:
        parsed = self._planner.parse(body)
        if parsed.model != services.model_name:
            raise NotFoundError(f"The model `{parsed.model}` does not exist; this server has `{services.model_name}`", "model")
        check_counts(parsed, services.config.router)
        return parsed


def _admitted(services: Services, scope: Scope, ticket: Ticket, plan: AnswerPlan) -> RequestHead:
    """Raises RateLimitError."""
    services.admission.charge(ticket, plan.num_prompt_tokens)
    if session := header(scope, services.session_header):
        ticket = replace(ticket, session=session)
    head = head_of(scope, services.cors)
    return head._replace(ticket=ticket, lines=head.lines + services.admission.limit_lines(ticket))


async def tokenize(codec: TextCodec, texts: Texts) -> tuple[tuple[int, ...], ...]:
    """The tokens of each, without holding up the event loop."""
    return await asyncio.to_thread(_encoded, codec, texts) if texts.is_long else _encoded(codec, texts)


def _encoded(codec: TextCodec, texts: Texts) -> tuple[tuple[int, ...], ...]:
    return tuple([codec.encode(text, texts.add_special_tokens) for text in texts.texts])


def _nothing() -> None:
    return None


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
    seed = _drawing.getrandbits(63) if request.seed is None else request.seed
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
            grammar=None if request.form is None else request.form.grammar,
        )
        for index in range(request.n)
    )
    return PreparedPrompt(token_ids, samplings, takes_what_fits=wanted is None)


def new_response_id(prefix: str) -> str:
    return f"{prefix}-{_drawing.getrandbits(96):024x}"


def now_s() -> int:
    """Seconds since the epoch, for `created` only."""
    return int(time.time())
