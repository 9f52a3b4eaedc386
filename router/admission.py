"""Who gets in: API keys, the limit of open requests, the size of bodies, the length of prompts. Decided before any worker hears of it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope

from pd_serve.errors import AuthenticationError, ContextLengthError, InvalidRequestError, OverloadedError, RequestError
from pd_serve.observe import Metrics
from router.linked_worker import LinkedWorker
from router.occupancy import Occupancy
from router.tenants import RateLimitError, Tenants, Ticket


class BodyTooLargeError(RequestError):
    code = "request_too_large"
    http_status = 413


class Admission:
    """Counts requests in progress; enter() and leave() come in pairs, by the same caller.

    enter -> charge the prompt -> leave with what was generated, or give_back what could not be served.
    """

    def __init__(self, max_open: int, tenants: Tenants, metrics: Metrics, occupancy: Occupancy) -> None:
        self._max_open = max_open
        self._tenants = tenants
        self._metrics = metrics
        self._occupancy = occupancy

    @property
    def num_open(self) -> int:
        """Of all processes of this router."""
        return self._occupancy.num_open

    def enter(self, scope: Scope) -> Ticket:
        """Of an HTTP request. Raises AuthenticationError, InvalidRequestError, RateLimitError, OverloadedError, having counted nothing."""
        try:
            ticket = self._tenants.ticket(header(scope, b"authorization"), header(scope, self._tenants.priority_header))
        except AuthenticationError:
            self._metrics.count("pd_serve_rejections_total", "api_key")
            raise
        except RateLimitError:
            self._metrics.count("pd_serve_rejections_total", "requests_per_minute")
            raise
        if not self._occupancy.enter(self._max_open):
            self.give_back(ticket, 0)
            self._metrics.count("pd_serve_rejections_total", "open_requests")
            raise OverloadedError(f"{self.num_open} requests are in progress, which is the limit", retry_after_s=1.0)
        return ticket

    def charge(self, ticket: Ticket, num_prompt_tokens: int) -> None:
        """Raises RateLimitError, and then the request does not count against its tenant."""
        try:
            self._tenants.charge(ticket, num_prompt_tokens)
        except RateLimitError:
            self._metrics.count("pd_serve_rejections_total", "tokens_per_minute")
            raise

    def give_back(self, ticket: Ticket, num_prompt_tokens: int) -> None:
        """It was not served, by no fault of its own: it does not count against its tenant. leave() is still due."""
        self._tenants.spent(ticket, -num_prompt_tokens, num_requests=-1)

    def limit_lines(self, ticket: Ticket) -> bytes:
        """Header lines that tell its tenant what is left of its limits; empty where there are none."""
        return self._tenants.header_lines(ticket)

    def leave(self, ticket: Ticket, num_generated: int = 0) -> None:
        self._tenants.spent(ticket, num_generated)
        self._occupancy.leave()


def bearer_matches(authorization: str | None, keys: Iterable[bytes]) -> bool:
    """Compares with every key in constant time."""
    scheme, _, given = (authorization or "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    given_bytes = given.strip().encode("utf-8", "surrogatepass")
    matches = [hmac.compare_digest(given_bytes, key) for key in keys]
    return is_bearer and any(matches)


def header(scope: Scope, name: bytes) -> str | None:
    """Of an HTTP request; `name` in lower case."""
    for given, value in scope["headers"]:
        if given == name:
            text: str = value.decode("latin-1")
            return text
    return None


async def read_body(scope: Scope, receive: Receive, max_nbytes: int) -> bytes:
    """Raises BodyTooLargeError as soon as that is known, InvalidRequestError when the client goes away meanwhile."""
    declared = header(scope, b"content-length") or ""
    if declared.isdecimal() and declared.isascii() and (len(declared) > 18 or int(declared) > max_nbytes):
        raise BodyTooLargeError(f"the body of {declared} bytes exceeds the limit of {max_nbytes}")
    chunks: list[bytes] = []
    nbytes = 0
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidRequestError("the client went away while sending the body")
        chunk = message.get("body", b"")
        has_more = message.get("more_body", False)
        nbytes += len(chunk)
        if nbytes > max_nbytes:
            raise BodyTooLargeError(f"the body exceeds the limit of {max_nbytes} bytes")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@dataclass(frozen=True, slots=True)
class Limits:
    """What every linked worker can do, so that a request that is admitted can be served, and moved, anywhere."""

    max_context_tokens: int
    """Prompt + output; 0: not known yet."""
    max_prompt_tokens: int
    vocab_size: int
    allowed_prompt_tokens: int = 0
    """As configured, whatever the workers could take; 0: no limit of its own."""
    max_prompt_chars: int = 0
    """No prompt that could be taken has a longer text; 0: not known."""

    def check_text(self, num_chars: int, param: str) -> None:
        """Before anything is computed of the text. Raises ContextLengthError."""
        if self.max_prompt_chars and num_chars > self.max_prompt_chars:
            raise ContextLengthError(
                f"This server takes prompts of at most {self.max_prompt_chars} characters, but this one has {num_chars}", param
            )

    def check_prompt(self, token_ids: Sequence[int], param: str) -> None:
        """Raises ContextLengthError or InvalidRequestError."""
        if not token_ids:
            raise InvalidRequestError(f"'{param}' is empty: there is nothing to continue", param)
        self.check_length(len(token_ids), param)
        if max(token_ids) >= self.vocab_size:
            raise InvalidRequestError(f"'{param}' holds a token id that is not below the vocabulary size of {self.vocab_size}", param)

    def check_length(self, num_tokens: int, param: str) -> None:
        """Of a prompt, whatever the answer. Raises ContextLengthError."""
        if self.allowed_prompt_tokens and num_tokens > self.allowed_prompt_tokens:
            raise ContextLengthError(
                f"This server takes prompts of at most {self.allowed_prompt_tokens} tokens, but this one has {num_tokens}", param
            )
        longest = min(self.max_context_tokens, self.max_prompt_tokens)
        if self.max_context_tokens and num_tokens >= longest:
            raise ContextLengthError(
                f"This model's maximum context length is {longest} tokens, but the prompt has {num_tokens}: no room is left", param
            )

    def check_fits(self, num_tokens: int, param: str) -> None:
        """Of tokens that nothing has to follow. Raises ContextLengthError."""
        if self.max_context_tokens and num_tokens > self.max_context_tokens:
            raise ContextLengthError(f"This model's maximum context length is {self.max_context_tokens} tokens, but these are more", param)

    def output_budget(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """Tokens to generate: what was asked for, or all that fit. Raises ContextLengthError when what was asked for does not fit."""
        if not self.max_context_tokens:
            return wanted if wanted is not None else 2**20
        room = self.max_context_tokens - num_prompt_tokens
        if wanted is None:
            return room
        if wanted > room:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_context_tokens} tokens, but {num_prompt_tokens + wanted} were requested "
                f"({num_prompt_tokens} in the prompt, {wanted} for the answer)",
                "max_tokens",
            )
        return wanted


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What bounds a prompt before it is tokenized; 0: nothing."""

    max_token_chars: int = 0
    """Most characters that one token stands for."""
    max_prompt_chars: int = 0
    """As configured."""


def limits_of(
    workers: Iterable[LinkedWorker],
    configured_max_len: int,
    text_vocab_size: int,
    allowed_prompt_tokens: int = 0,
    text: TextLimits = TextLimits(),
) -> Limits:
    """The least of all workers. `configured_max_len` (0: none) holds while no worker is linked, and always as an upper bound."""
    contexts = [configured_max_len] if configured_max_len else []
    prompts: list[int] = []
    vocab_size: int | None = None
    for worker in workers:
        contexts.append(worker.welcome.max_model_len)
        vocab_size = worker.welcome.vocab_size
        if worker.has_reported:
            (contexts if worker.can_decode else prompts).append(worker.num_pool_tokens)
    context = min(contexts, default=0)
    prompt = min([context, *prompts])
    longest = min((tokens for tokens in (prompt, allowed_prompt_tokens) if tokens), default=0)
    chars = min((chars for chars in (longest * text.max_token_chars, text.max_prompt_chars) if chars), default=0)
    return Limits(context, prompt, text_vocab_size if vocab_size is None else vocab_size, allowed_prompt_tokens, chars)
