"""What is asked for the recorded shapes: a name, a path and a body each."""

from __future__ import annotations

import json

import httpx

from tests.conformance.shapes import Shape, shape_of
from tests.unit.router.cluster import MODEL, chat_body, completion_body, events_of

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, object]]] = {
    "chat": ("/v1/chat/completions", chat_body()),
    "chat logprobs": ("/v1/chat/completions", chat_body(logprobs=True, top_logprobs=2)),
    "chat stream": ("/v1/chat/completions", chat_body(**USAGE)),
    "chat stream logprobs": ("/v1/chat/completions", chat_body(**USAGE, logprobs=True, top_logprobs=1)),
    "chat refused": ("/v1/chat/completions", chat_body(temperature=9)),
    "completion": ("/v1/completions", completion_body()),
    "completion logprobs": ("/v1/completions", completion_body(logprobs=2)),
    "completion stream": ("/v1/completions", completion_body(**USAGE)),
    "response": ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 8}),
    "response stream": ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 8, "stream": True}),
    "tokenize": ("/tokenize", {"prompt": "hi"}),
    "detokenize": ("/detokenize", {"tokens": [5]}),
    "models": ("/v1/models", {}),
    "version": ("/version", {}),
}


def ask(client: httpx.Client, name: str) -> object:
    """The answer, or the list of a stream's events."""
    path, body = ASKED[name]
    response = client.post(path, json=body) if body else client.get(path)
    if not body.get("stream"):
        return response.json()
    if "responses" in path:
        return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]
    return events_of(response.text)


def shapes_of(client: httpx.Client) -> dict[str, Shape]:
    return {name: shape_of(ask(client, name)) for name in ASKED}


def without_what_differs(answer: object) -> object:
    """Ids and times."""
    if isinstance(answer, dict):
        return {name: without_what_differs(part) for name, part in answer.items() if name not in _DIFFERENT}
    return [without_what_differs(part) for part in answer] if isinstance(answer, list) else answer


_DIFFERENT = ("id", "created", "created_at", "completed_at", "item_id")
