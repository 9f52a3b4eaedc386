"""`pd-serve chat`: talk to an OpenAI-compatible endpoint in the terminal, streamed. Works against any such server."""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from rich.console import Console

from pd_serve.cli.http import EndpointError, refused, unreachable

HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer"
_TIMEOUT = httpx.Timeout(10.0, read=300.0)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatSettings:
    url: str
    model: str
    """Empty: the first the endpoint lists."""
    system: str
    temperature: float
    max_tokens: int
    api_key: str


class Conversation:
    """The messages so far. An answer that fails or is interrupted leaves them as they were."""

    def __init__(self, client: httpx.Client, settings: ChatSettings) -> None:
        self._client = client
        self._settings = settings
        self._model = settings.model or _first_model(client)
        self.messages: list[Message] = []
        self.reset()

    @property
    def model(self) -> str:
        return self._model

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._settings.system}] if self._settings.system else []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they come. Raises EndpointError."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {
            "model": self._model,
            "messages": messages,
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
            "stream": True,
        }
        answer = ""
        for piece in _stream(self._client, body):
            answer += piece
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def run_chat(settings: ChatSettings, message: str | None, tls: ssl.SSLContext | None = None) -> int:
    """One answer when there is a message, else a conversation. `tls` None: the usual authorities. Raises EndpointError."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    verify = True if tls is None else tls
    with httpx.Client(base_url=settings.url.rstrip("/"), headers=headers, timeout=_TIMEOUT, trust_env=False, verify=verify) as client:
        conversation = Conversation(client, settings)
        if message is not None:
            _print_answer(conversation.ask(sys.stdin.read() if message == "-" else message))
            return 0
        return _converse(conversation)


def _converse(conversation: Conversation) -> int:
    console = Console(stderr=True, highlight=False)
    console.print(f"[dim]{conversation.model}: {HELP}[/]")
    while True:
        try:
            text = console.input("[bold cyan]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            conversation.reset()
            console.print("[dim]forgotten[/]")
        elif text in ("/help", "/?"):
            console.print(f"[dim]{HELP}[/]")
        elif text:
            try:
                _print_answer(conversation.ask(text))
            except KeyboardInterrupt:
                console.print(" [dim](stopped)[/]")
            except EndpointError as error:
                console.print(f"[red]{error.message}[/]", soft_wrap=True)


def _print_answer(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _first_model(client: httpx.Client) -> str:
    url = str(client.base_url)
    try:
        reply = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, error) from error
    if reply.status_code != httpx.codes.OK:
        raise refused(url, reply.status_code, reply.text)
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"{url} lists no model; give one with --model") from error


def _stream(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    url = str(client.base_url)
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                raise refused(url, reply.status_code, reply.read().decode(errors="replace"))
            for line in reply.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield _content(data, url)
    except httpx.HTTPError as error:
        raise unreachable(url, error) from error
    raise EndpointError(f"{url} ended the answer early")


def _content(data: str, url: str) -> str:
    """The text in one event; empty for events without any."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise EndpointError(f"{url}: {event['error']['message']}")
        choices = event["choices"]
        return str(choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise EndpointError(f"{url} sent an event that is no chat chunk: {data[:120]}") from error
