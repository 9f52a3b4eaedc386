"""Clients that behave badly, or are counted on to be answered well: over a socket of their own, or many at once."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx

RECEIVE_TIMEOUT_S = 60.0


def completion_body(prompt: list[int], max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}


def ask(url: str, prompt: list[int], max_tokens: int) -> str:
    """The text of a greedy answer. AssertionError for anything but a 200."""
    reply = httpx.post(f"{url}/v1/completions", json=completion_body(prompt, max_tokens), timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


class LeavingClient:
    """A streaming request on a connection of its own: sent at once, closed by leave()."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        place = urlsplit(url)
        body = json.dumps(completion_body(prompt, max_tokens, stream=True)).encode()
        self._socket = socket.create_connection((place.hostname or "", place.port or 80), timeout=RECEIVE_TIMEOUT_S)
        headers = (f"Host: {place.netloc}", "Content-Type: application/json", f"Content-Length: {len(body)}")
        self._socket.sendall("\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "", "")).encode() + body)
        self._received = b""

    def wait_for_tokens(self, num_tokens: int = 1) -> None:
        """Until so many tokens have arrived."""
        while self._received.count(b'"text":') < num_tokens:
            data = self._socket.recv(65536)
            assert data, f"closed by the router after {self._received!r}"
            self._received += data

    def leave(self) -> None:
        """Idempotent."""
        self._socket.close()
