"""The client of the token path: one streamed request of any OpenAI-compatible endpoint, and when each of its tokens came.

Used by everything here that measures an endpoint, whoever serves it. Owned by the event loop of the run. What must stay true: a request
that fails is a record with its error, never an exception, and nothing is done for a token but to note its time.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from pd_serve.bench.errors import BenchError, missing_library
from pd_serve.bench.records import RequestPlan, RequestRecord

if TYPE_CHECKING:
    import aiohttp

KEEPALIVE_S = 3.0
"""An idle connection is used again for this long: less than servers keep theirs (uvicorn: 5 s), or requests meet a closed one."""
_ERROR_CHARS = 300
_REJECTED = (400, 422)
LEFT = "left"
"""`finish_reason` of a stream that the client left at its time."""


@dataclass(frozen=True, slots=True)
class RequestStyle:
    """How a plan is put to the server."""

    chat: bool = False
    """POST /v1/chat/completions with one user message; needs prompts of text."""
    every_token: bool = True
    """Ask for `logprobs`, so that each token is told of when it comes: without, one that ends inside a character shows with the next."""
    ignore_eos: bool = True
    """Generate all max_tokens, where the server takes this extension."""
    temperature: float = 0.0


class Endpoint:
    """`async with Endpoint(url) as endpoint: await endpoint.stream(plan, start)`. `model` empty: the first of /v1/models.

    Entering raises BenchError when nobody answers, or no model is served.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        api_key: str = "",
        timeout_s: float = 600.0,
        style: RequestStyle = RequestStyle(),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._style = style
        self._timeout_s = timeout_s
        self._tls = tls
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extensions: dict[str, object] = {"ignore_eos": True} if style.ignore_eos else {}
        """Fields not every server knows; one that is refused is not sent again."""
        self._session: aiohttp.ClientSession | None = None
        self._failures: tuple[type[Exception], ...] = ()

    async def __aenter__(self) -> Endpoint:
        try:
            import aiohttp
        except ImportError as error:
            raise missing_library("aiohttp", error) from error
        self._failures = (aiohttp.ClientError, TimeoutError, OSError)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=self._tls if self._tls is not None else True)
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=10.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, auto_decompress=False, trust_env=False
        )
        try:
            self.model = self.model or await self._discover()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def stream(self, plan: RequestPlan, start: float, until_s: float = math.inf) -> RequestRecord:
        """Send one request and follow its stream to the end. `start`: time.monotonic() at the start of the run. `until_s`: seconds after it
        at which the stream is left with the tokens it has brought; the record is whole, with LEFT for its finish.

        What fails (no connection, an error status, a stream that breaks off) is told in the record.
        """
        reply = _Reply()
        while True:
            path, body = self._request(plan)
            sent_s = time.monotonic() - start
            status, error = 0, ""
            limit = asyncio.timeout(None if math.isinf(until_s) else max(0.0, until_s - sent_s))
            try:
                async with limit:
                    status, error = await self._exchange(path, body, reply)
            except self._failures as failure:
                error = "timed out" if isinstance(failure, TimeoutError) else (str(failure) or type(failure).__name__)
            if limit.expired():
                status, error, reply.finish_reason = 200, "", LEFT
            if not (status in _REJECTED and self._drop_extension(error)):
                break
        if not error:
            error = reply.trouble
        num_prompt = reply.num_prompt_tokens or (0 if isinstance(plan.prompt, str) else len(plan.prompt))
        return RequestRecord(
            index=plan.index,
            kind=plan.kind,
            planned_s=plan.at_s,
            sent_s=sent_s,
            token_s=tuple(moment - start for moment in reply.token_s),
            num_prompt_tokens=num_prompt,
            num_output_tokens=reply.num_output_tokens or len(reply.token_s),
            status=status,
            error=error[:_ERROR_CHARS],
            finish_reason=reply.finish_reason,
            num_cached_tokens=reply.num_cached_tokens,
        )

    async def text(self, path: str) -> str:
        """The body of GET `path`, such as /metrics. Raises BenchError."""
        assert self._session is not None, "used outside async with"
        try:
            async with self._session.get(self.url + path) as reply:
                body = await reply.text(errors="replace")
                if reply.status != 200:
                    raise BenchError(f"{self.url}{path} answered {reply.status}: {_message(body)}")
                return body
        except self._failures as error:
            raise BenchError(f"cannot reach {self.url}: {str(error) or type(error).__name__}; is it running?") from error
        except ValueError as error:  # aiohttp's InvalidURL among them
            raise BenchError(f"cannot reach {self.url}: {error}") from error

    async def _discover(self) -> str:
        body = await self.text("/v1/models")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as error:
            raise BenchError(f"{self.url} is no OpenAI-compatible endpoint: {error}") from error
        if not models:
            raise BenchError(f"{self.url} serves no model yet")
        return models[0].id

    def _request(self, plan: RequestPlan) -> tuple[str, bytes]:
        style = self._style
        body: dict[str, object] = {"model": self.model, "max_tokens": plan.max_tokens, "temperature": style.temperature, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._extensions}
        if not style.chat:
            extra: dict[str, object] = {"logprobs": 0} if style.every_token else {}
            return "/v1/completions", msgspec.json.encode({**body, "prompt": plan.prompt, **extra})
        if not isinstance(plan.prompt, str):
            raise BenchError("chat takes text: these prompts are token ids")
        extra = {"logprobs": True} if style.every_token else {}
        return "/v1/chat/completions", msgspec.json.encode({**body, "messages": [{"role": "user", "content": plan.prompt}], **extra})

    async def _exchange(self, path: str, body: bytes, reply: _Reply) -> tuple[int, str]:
        """Status, and the error of an answer that is no stream."""
        assert self._session is not None, "used outside async with"
        async with self._session.post(self.url + path, data=body) as response:
            if response.status != 200:
                return response.status, _message(await response.text(errors="replace")) or f"status {response.status}"
            content_type = response.headers.get("Content-Type", "")
            if "event-stream" not in content_type:
                return response.status, f"expected an event stream, got {content_type or 'no content type'}"
            try:
                async for piece in response.content.iter_any():
                    reply.feed(piece, time.monotonic())
            except asyncio.CancelledError:
                raise
            except self._failures as failure:
                return response.status, f"the stream broke off: {str(failure) or type(failure).__name__}"
            return response.status, ""

    def _drop_extension(self, error: str) -> bool:
        refused = [name for name in self._extensions if name in error]
        for name in refused:
            del self._extensions[name]
        return bool(refused)


@dataclass(slots=True)
class _Reply:
    """What a stream of server-sent events has brought so far."""

    token_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = -1
    finish_reason: str = ""
    error: str = ""
    is_done: bool = False
    rest: bytes = b""

    @property
    def trouble(self) -> str:
        """Why this is no whole answer; empty: it is."""
        if self.error:
            return self.error
        return "" if self.finish_reason else "the stream ended without a finish"

    def feed(self, piece: bytes, now: float) -> None:
        lines = (self.rest + piece).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def _take(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event that is none: {error}"
            return
        if event.error is not None:
            self.error = event.error if isinstance(event.error, str) else event.error.message or "an error event"
        for choice in event.choices:
            for _ in range(choice.num_tokens):
                self.token_s.append(now)
            self.finish_reason = choice.finish_reason or self.finish_reason
        if event.usage is not None:
            self.num_prompt_tokens = event.usage.prompt_tokens
            self.num_output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None and event.usage.prompt_tokens_details.cached_tokens is not None:
                self.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens


# ---- the wire, as far as it is read; unknown fields are passed over


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Logprobs(msgspec.Struct):
    tokens: list[msgspec.Raw] | None = None
    content: list[msgspec.Raw] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """As many as have log-probabilities; where there are none, one for an event with text."""
        if self.logprobs is not None and (self.logprobs.tokens or self.logprobs.content):
            return len(self.logprobs.tokens or self.logprobs.content or ())
        if self.text:
            return 1
        return 1 if self.delta is not None and (self.delta.content or self.delta.reasoning_content) else 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _message(body: str) -> str:
    """The message of an OpenAI-style error body, where there is one, else the body in one line."""
    try:
        error: Any = msgspec.json.decode(body, type=_Event).error
    except msgspec.DecodeError:
        error = None
    text = error if isinstance(error, str) else error.message if error is not None else ""
    return " ".join((text or body).split())[:_ERROR_CHARS]
