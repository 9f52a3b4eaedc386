"""One HTTP request's choices from submission to the last byte: reads generations, makes text, answers whole or as a stream.

    submit -> first token or failure -> status line -> tokens ... -> usage, [DONE]

A failure before the first byte has its own status; after it, an error event ends the stream, without a finish.
Tokens of a client that keeps up are written where they arrive, with no task between: one write for all that came together. A task sees
to the beginning, to the end, and to a client that does not keep up.

The client's going away is noticed at any moment (also while queued) and cancels every choice at once, on both legs. Whatever happens,
when the response ends, nothing of it is left in the dispatcher and admission has been left.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pd_serve.errors import PdServeError
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.server import AnswerLine, line_of
from router.api.errors import error_response
from router.choice import ChoiceText, Piece
from router.generation import Generation
from router.services import Services
from router.sse import DONE, EventWriter, error_event
from router.whole import UsageCounts

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Label of pd_serve_requests_total when the client went away; never sent. Source: nginx."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    token_ids: tuple[int, ...]
    samplings: tuple[SamplingParams, ...]
    """One per choice."""
    takes_what_fits: bool = False
    """The client named no max_tokens."""


@dataclass(slots=True)
class ChoiceState:
    text: ChoiceText
    generation: Generation
    pieces: list[Piece]
    """Kept for whole answers only."""
    has_begun: bool = False
    is_over: bool = False


class AnswerBuilder(Protocol):
    def whole(self, choices: list[ChoiceState], usage: UsageCounts) -> bytes:
        """JSON."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the client wants it."""

    response_id: str
    prompts: tuple[PreparedPrompt, ...]
    stops: tuple[str, ...]
    builder: AnswerBuilder
    events: EventWriter | None
    """None: one whole answer."""
    include_usage: bool


class ExchangeResponse(Response):
    """The response to a generation request. Admission has been entered; it is left here."""

    def __init__(self, services: Services, plan: AnswerPlan, received_at: float = 0.0) -> None:
        """`received_at`: monotonic seconds at which the request began to come in, for the timeline."""
        self.status_code = 200
        self.background = None
        self._services = services
        self._plan = plan
        self._received_at = received_at
        self._choices: list[ChoiceState] = []
        self._wake = asyncio.Event()
        self._is_client_gone = False
        self._max_backlog = services.config.router.max_stream_backlog_tokens
        self._is_sending = False
        """A part of the stream is on its way out: until it is, tokens pile up."""
        self._line: AnswerLine | None = None
        self._is_pouring = False
        """The stream has begun, and its task waits for news: tokens may be written without it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        code = CLIENT_CLOSED_REQUEST
        self._line = line = line_of(scope)
        line.watch(self._client_gone)
        try:
            try:
                self._submit()
                await self._news()
                self._raise_failure()
            except PdServeError as error:
                self._cancel_all()
                code = error.http_status
                await error_response(error)(scope, receive, send)
                return
            code = await (self._stream(line, self._plan.events) if self._plan.events else self._answer(line, scope, receive, send))
        finally:
            self._is_pouring = False
            line.watch(_nothing)
            self._cancel_all()
            self._choices.clear()  # each refers to this exchange, and this to each: nothing would let go of them soon
            self._services.admission.leave()
            self._services.metrics.count("pd_serve_requests_total", str(CLIENT_CLOSED_REQUEST if self._is_client_gone else code))

    # ---- choices

    def _submit(self) -> None:
        wakes_on_token = self._plan.events is not None or bool(self._plan.stops)
        for prompt in self._plan.prompts:
            generations = self._services.dispatcher.submit(
                prompt.token_ids, prompt.samplings, self._woken, wakes_on_token, prompt.takes_what_fits, self._received_at
            )
            for generation, sampling in zip(generations, prompt.samplings, strict=True):
                text = ChoiceText(self._services.codec, self._plan.stops, sampling.min_tokens)
                self._choices.append(ChoiceState(text, generation, []))

    async def _news(self) -> None:
        """Wait until some choice has something new."""
        await self._wake.wait()
        self._wake.clear()

    def _woken(self) -> None:
        """A client that does not read may not make this process hold ever more for it."""
        if self._is_pouring and self._pour():
            return
        self._wake.set()
        if self._is_sending and sum(len(choice.generation.tokens) for choice in self._choices) > self._max_backlog:
            logger.warning("%s cut: the client does not read its stream", self._plan.response_id)
            self._client_gone()
            assert self._line is not None
            self._line.cut()

    def _pour(self) -> bool:
        """Write what has come. False: there is more to do than that, or the client does not keep up; the task sees to it."""
        line, events = self._line, self._plan.events
        if line is None or events is None or not line.is_clear:
            return False
        for choice in self._choices:
            if not choice.is_over and (choice.generation.finish is not None or choice.generation.error is not None):
                return False
        out: list[bytes] = []
        is_over = False
        for index, choice in enumerate(self._choices):
            if choice.generation.tokens and not choice.is_over:
                self._write_choice(out, events, index, choice)
                is_over = is_over or choice.is_over
        if part := b"".join(out):
            line.write(part)
        return not is_over

    def _raise_failure(self) -> None:
        for choice in self._choices:
            if choice.generation.error is not None:
                raise choice.generation.error

    def _cancel_all(self) -> None:
        for choice in self._choices:
            self._services.dispatcher.cancel(choice.generation)

    def _client_gone(self) -> None:
        self._is_client_gone = True
        self._cancel_all()
        self._wake.set()

    def _drain(self, choice: ChoiceState) -> list[Piece]:
        """Pieces of the tokens that came since; marks the choice over, and cancels it when a stop string was found."""
        generation, text = choice.generation, choice.text
        tokens, generation.tokens = generation.tokens, []
        pieces: list[Piece] = []
        if self._plan.events is None and text.are_plain(tokens):
            pieces, tokens = [Piece(text.push_all(tokens), -1, None)], []
        for token in tokens:
            pieces.append(text.push(token))
            if text.finish_reason is not None:
                self._services.dispatcher.cancel(generation)
                break
        else:
            if generation.finish is not None:
                rest = text.finish(generation.finish)
                if rest:
                    pieces.append(Piece(rest, -1, None))
        choice.is_over = text.finish_reason is not None
        return pieces

    def _usage(self) -> UsageCounts:
        """Each prompt counts once however many choices it has, and a token once however often its choice moved."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._plan.prompts)
        num_completion = sum(choice.text.num_tokens for choice in self._choices)
        num_cached = 0
        first = 0
        for prompt in self._plan.prompts:
            num_cached += min(self._choices[first].text.num_cached_tokens, len(prompt.token_ids))
            first += len(prompt.samplings)
        return UsageCounts(num_prompt, num_completion, num_cached)

    # ---- answers

    async def _answer(self, line: AnswerLine, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            while True:
                self._raise_failure()
                for choice in self._choices:
                    if not choice.is_over:
                        choice.pieces += self._drain(choice)
                if self._is_client_gone:
                    return CLIENT_CLOSED_REQUEST
                if all(choice.is_over for choice in self._choices):
                    break
                await self._news()
        except PdServeError as error:
            self._cancel_all()
            await error_response(error)(scope, receive, send)
            return error.http_status
        body = self._plan.builder.whole(self._choices, self._usage())
        await line.answer(_headers(self._plan.response_id, b"application/json"), body)
        return 200

    async def _stream(self, line: AnswerLine, events: EventWriter) -> int:
        line.begin(_headers(self._plan.response_id, b"text/event-stream; charset=utf-8"))
        while not self._is_client_gone:
            out: list[bytes] = []
            error: PdServeError | None = None
            for index, choice in enumerate(self._choices):
                if choice.is_over:
                    continue
                if choice.generation.tokens or choice.generation.finish is not None:
                    self._write_choice(out, events, index, choice)
                if not choice.is_over and choice.generation.error is not None:
                    error = choice.generation.error
            if error is not None:
                logger.warning("%s broke off: %s", self._plan.response_id, error.message)
                out.append(error_event(error))
                await self._send(line, out, is_last=True)
                return error.http_status
            is_last = all(choice.is_over for choice in self._choices)
            if is_last:
                if self._plan.include_usage:
                    out.append(events.usage(self._usage()))
                out.append(DONE)
            if out:
                await self._send(line, out, is_last)
            if is_last:
                return 200
            self._is_pouring = True
            await self._news()
            self._is_pouring = False
        return CLIENT_CLOSED_REQUEST

    async def _send(self, line: AnswerLine, parts: list[bytes], is_last: bool) -> None:
        self._is_sending = True
        await line.until_clear()
        self._is_sending = False
        line.write(b"".join(parts), is_last)

    def _write_choice(self, out: list[bytes], events: EventWriter, index: int, choice: ChoiceState) -> None:
        if not choice.has_begun:
            choice.has_begun = True
            out.append(events.begin(index))
        generation = choice.generation
        if len(generation.tokens) > 1 and choice.text.are_plain(generation.tokens):
            tokens, generation.tokens = generation.tokens, []
            out.append(events.texts(index, choice.text.push_plain(tokens)))
        for piece in self._drain(choice):
            out.append(events.piece(index, piece))
        if choice.text.finish_reason is not None:
            out.append(events.finish(index, choice.text.finish_reason))


def _nothing() -> None:
    return None


def _headers(response_id: str, content_type: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", content_type), (b"cache-control", b"no-cache"), (b"x-request-id", response_id.encode())]
