"""One HTTP request's choices from submission to the last byte: reads generations, makes text, answers whole or as a stream.

    submit -> first token or failure -> status line -> tokens ... -> usage, [DONE]

A failure before the first byte has its own status; after it, an error event ends the stream, without a finish.
There is no task: what has come is written where it arrives, one write for all that came together, and a client that does not keep up is
written to again when it has read. What the callbacks raise ends here, as an error 500 or a connection cut.

The client's going away is noticed at any moment (also while queued) and cancels every choice at once, on both legs. Whatever happens,
when the response ends, nothing of it is left in the dispatcher and admission has been left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pd_serve.errors import PdServeError, UnavailableError
from pd_serve.observe import about
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.server import AnswerLine
from router.api.errors import error_response, header_lines
from router.choice import ChoiceText, Piece
from router.generation import Generation
from router.phases import phases_event, phases_line
from router.request_head import RequestHead
from router.services import Services
from router.sse import DONE, EventWriter, error_event
from router.timeline import Record
from router.whole import UsageCounts

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Label of pd_serve_requests_total when the client went away; never sent. Source: nginx."""


class PreparedPrompt(NamedTuple):
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


class Parsing(Protocol):
    """How more than content is read out of a text (router/tools)."""

    @property
    def ends_early(self) -> bool:
        """The answer may be over before the model ends it."""
        ...

    def text(self, stops: tuple[str, ...], min_tokens: int) -> ChoiceText:
        """Of a new choice."""
        ...


class AnswerPlan(NamedTuple):
    """How the client wants it."""

    response_id: str
    prompts: tuple[PreparedPrompt, ...]
    stops: tuple[str, ...]
    builder: AnswerBuilder
    events: EventWriter | None
    """None: one whole answer."""
    include_usage: bool
    done: bytes = DONE
    """Ends a stream that went well."""
    broken: Callable[[PdServeError], bytes] = error_event
    """Ends one that broke."""
    parsing: Parsing | None = None
    """None: all text is content."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum([len(prompt.token_ids) for prompt in self.prompts])


class Exchange:
    """The answer to a generation request: start(), and it takes care of itself. Admission has been entered; it is left here.

    `on_end` is called once, when the response has ended. `received_at`: monotonic seconds at which the request began to come in, for the
    timeline.
    """

    __slots__ = (
        "_choices",
        "_has_begun",
        "_head",
        "_is_client_gone",
        "_is_over",
        "_line",
        "_on_end",
        "_plan",
        "_received_at",
        "_records",
        "_services",
    )

    def __init__(
        self,
        services: Services,
        plan: AnswerPlan,
        head: RequestHead,
        line: AnswerLine,
        received_at: float,
        on_end: Callable[[], None],
    ) -> None:
        self._services = services
        self._plan = plan
        self._head = head
        self._line = line
        self._received_at = received_at
        self._on_end = on_end
        self._choices: list[ChoiceState] = []
        self._records: list[Record] = []
        """Of its choices, where the client wants to be told."""
        self._has_begun = False
        """The status line of a stream has been written."""
        self._is_client_gone = False
        self._is_over = False

    def start(self) -> None:
        """Precondition: nothing of the answer has been sent. Raises nothing."""
        self._line.watch(self._client_gone, self._woken)
        if self._is_over:
            return
        try:
            self._submit()
        except PdServeError as error:
            self._refuse(error)
        except Exception:  # noqa: BLE001 - root of callbacks: logged, and the client's answer ends
            self._broken()

    @property
    def _ids(self) -> dict[str, str | int]:
        """Of a log line about it."""
        return about(self._head.request_id, self._plan.response_id)

    @property
    def _name(self) -> str:
        """In the log."""
        return f"{self._plan.response_id} (request {self._head.request_id})"

    def abandon(self) -> None:
        """Whoever waited for its end waits no more. Idempotent."""
        self._end(CLIENT_CLOSED_REQUEST)

    # ---- choices

    def _submit(self) -> None:
        plan, timeline = self._plan, self._services.dispatcher.timeline
        wakes_on_token = plan.events is not None or bool(plan.stops) or (plan.parsing is not None and plan.parsing.ends_early)
        for prompt in plan.prompts:
            generations = self._services.dispatcher.submit(
                prompt.token_ids,
                prompt.samplings,
                self._woken,
                wakes_on_token,
                prompt.takes_what_fits,
                self._received_at,
                self._head.ticket,
            )
            for generation, sampling in zip(generations, prompt.samplings, strict=True):
                if plan.parsing is None:
                    text = ChoiceText(self._services.codec, plan.stops, sampling.min_tokens)
                else:
                    text = plan.parsing.text(plan.stops, sampling.min_tokens)
                self._choices.append(ChoiceState(text, generation, []))
                record = timeline.named(generation.key, self._head.request_id, plan.response_id, self._head.traceparent)
                if record is not None and self._head.wants_timeline:
                    self._records.append(record)

    def _woken(self) -> None:
        """Some choice has something new, or the client has read. A root of callbacks."""
        if self._is_over:
            return
        try:
            if self._plan.events is None:
                self._collect()
            elif not self._line.is_clear:
                self._bound_backlog()
            elif self._has_begun or not self._refuse_failure():
                self._stream(self._plan.events)
        except Exception:  # noqa: BLE001 - root of callbacks: logged, and the client's answer ends
            self._broken()

    def _bound_backlog(self) -> None:
        """A client that does not read may not make this process hold ever more for it."""
        if sum(len(choice.generation.tokens) for choice in self._choices) > self._services.config.router.max_stream_backlog_tokens:
            logger.warning("%s cut: the client does not read its stream", self._name, extra=self._ids)
            self._client_gone()
            self._line.cut()

    def _refuse_failure(self) -> bool:
        """True: a choice has failed before anything was sent, and the client has been told."""
        for choice in self._choices:
            if choice.generation.error is not None:
                self._refuse(choice.generation.error)
                return True
        return False

    def _cancel_all(self) -> None:
        for choice in self._choices:
            self._services.dispatcher.cancel(choice.generation)

    def _client_gone(self) -> None:
        if not self._is_over:
            self._is_client_gone = True
            self._end(CLIENT_CLOSED_REQUEST)

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
                pieces += text.end(generation.finish)
        choice.is_over = text.finish_reason is not None
        return pieces

    def _usage(self) -> UsageCounts:
        """Each prompt counts once however many choices it has, and a token once however often its choice moved."""
        num_prompt = self._plan.num_prompt_tokens
        num_completion = sum(choice.text.num_tokens for choice in self._choices)
        num_cached = 0
        first = 0
        for prompt in self._plan.prompts:
            num_cached += min(self._choices[first].text.num_cached_tokens, len(prompt.token_ids))
            first += len(prompt.samplings)
        reasoning = [count for choice in self._choices if (count := choice.text.num_reasoning_tokens) is not None]
        return UsageCounts(num_prompt, num_completion, num_cached, sum(reasoning) if reasoning else None)

    # ---- answers

    def _collect(self) -> None:
        """Towards one whole answer, which waits for a client that has not read the one before."""
        if self._refuse_failure():
            return
        is_complete = True
        for choice in self._choices:
            if not choice.is_over:
                choice.pieces += self._drain(choice)
                is_complete = is_complete and choice.is_over
        if is_complete and self._line.is_clear:
            body = self._plan.builder.whole(self._choices, self._usage())
            headers = _headers(self._head, b"application/json")
            if self._records:
                headers += phases_line(self._head.request_id, self._records)
            self._line.answer(headers, body)
            self._end(200)

    def _stream(self, events: EventWriter) -> None:
        out: list[bytes] = []
        error: PdServeError | None = None
        is_last = True
        for index, choice in enumerate(self._choices):
            if choice.is_over:
                continue
            generation = choice.generation
            if generation.tokens or generation.finish is not None:
                self._write_choice(out, events, index, choice)
            if not choice.is_over:
                is_last = False
                error = error or generation.error
        if error is not None:
            logger.warning("%s broke off: %s", self._name, error.message, extra=self._ids)
            out.append(self._plan.broken(error))
        elif is_last:
            if self._plan.include_usage:
                out.append(events.usage(self._usage()))
            if self._records:
                out.append(phases_event(self._head.request_id, self._records))
            out.append(self._plan.done)
        if not self._has_begun:
            self._has_begun = True
            self._line.begin(_headers(self._head, b"text/event-stream; charset=utf-8"))
        is_last = is_last or error is not None
        self._line.write(b"".join(out), is_last)
        if is_last:
            self._end(200 if error is None else error.http_status)

    def _write_choice(self, out: list[bytes], events: EventWriter, index: int, choice: ChoiceState) -> None:
        if not choice.has_begun:
            choice.has_begun = True
            out.append(events.begin(index))
        generation = choice.generation
        if choice.text.are_plain(generation.tokens):
            tokens, generation.tokens = generation.tokens, []
            out.append(events.texts(index, choice.text.push_plain(tokens)))
            if generation.finish is None:
                return
        for piece in self._drain(choice):
            out.append(events.piece(index, piece))
        if choice.text.finish_reason is not None:
            out.append(events.finish(index, choice.text.finish_reason))

    # ---- the end

    def _refuse(self, error: PdServeError) -> None:
        """An answer of its own, as nothing has been sent yet. To a client that has not read the one before, it comes all the same."""
        self._cancel_all()
        if isinstance(error, UnavailableError):
            self._services.admission.give_back(self._head.ticket, self._plan.num_prompt_tokens)
        response = error_response(error)
        self._line.answer(header_lines(response) + self._head.lines, bytes(response.body), response.status_code)
        self._end(error.http_status)

    def _broken(self) -> None:
        """A bug: the text of it stays in the log. Called where an exception is handled."""
        logger.exception("%s failed", self._name, extra=self._ids)
        error = PdServeError("internal error")
        if self._line.has_begun:
            self._line.cut()
            self._end(error.http_status)
        else:
            self._refuse(error)

    def _end(self, code: int) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._line.unwatch()
        self._cancel_all()
        num_generated = sum([choice.generation.lifecycle.num_output_tokens for choice in self._choices])
        self._choices.clear()  # each refers to this exchange, and this to each: nothing would let go of them soon
        self._services.admission.leave(self._head.ticket, num_generated)
        self._services.metrics.count("pd_serve_requests_total", str(code))
        self._on_end()


def _headers(head: RequestHead, content_type: bytes) -> bytes:
    return b"content-type: %b\r\ncache-control: no-cache\r\n%b" % (content_type, head.lines)
