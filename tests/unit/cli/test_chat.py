"""Chat against a small server: one-shot, conversation, errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from pd_serve.cli.app import run

sys.path.insert(0, str(Path(__file__).parent))
from endpoints import Endpoint, serving

MODELS = {"/v1/models": (200, {"data": [{"id": "tiny"}]})}
CHAT = "/v1/chat/completions"


def chunk(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def answer(*pieces: str) -> dict[str, tuple[int, object]]:
    first = json.dumps({"choices": [{"delta": {"role": "assistant"}}]})
    usage = json.dumps({"choices": [], "usage": {}})
    return {**MODELS, CHAT: (200, [first, *(chunk(piece) for piece in pieces), usage, "[DONE]"])}


def chat(endpoint: Endpoint, *arguments: str) -> int:
    return run(["chat", "--url", endpoint.url, *arguments])


def test_one_message_prints_the_answer_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer("Hel", "lo\n", "there")) as endpoint:
        assert chat(endpoint, "Hi", "--system", "Be brief", "--temperature", "0", "--api-key", "k") == 0
    assert capsys.readouterr().out == "Hello\nthere\n"
    assert endpoint.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
            "temperature": 0.0,
            "max_tokens": 512,
            "stream": True,
        }
    ]
    assert endpoint.authorizations == ["Bearer k", "Bearer k"]


def test_message_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    with serving(answer("ok")) as endpoint:
        assert chat(endpoint, "-") == 0
    assert endpoint.bodies[0]["messages"] == [{"role": "user", "content": "from a pipe"}]


def test_conversation_remembers_until_reset(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nnever\n"))
    with serving(answer("yes")) as endpoint:
        assert chat(endpoint) == 0
    asked = [[message["content"] for message in body["messages"]] for body in endpoint.bodies]
    assert asked == [["one"], ["one", "yes", "two"], ["three"]]
    assert capsys.readouterr().out.count("yes\n") == 3


def test_failed_answer_is_not_remembered_and_does_not_end_the_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with serving({**MODELS, CHAT: (429, {"error": {"message": "too many"}})}) as endpoint:
        assert chat(endpoint) == 0
    assert [[message["content"] for message in body["messages"]] for body in endpoint.bodies] == [["one"], ["two"]]
    assert "answered 429: too many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "answered 404: no such path"),
        ({"/v1/models": (200, {"data": []})}, "lists no model"),
        ({**MODELS, CHAT: (200, [chunk("half")])}, "ended the answer early"),
        ({**MODELS, CHAT: (200, ["not json"])}, "no chat chunk"),
        ({**MODELS, CHAT: (200, [json.dumps({"error": {"message": "worker lost"}})])}, "worker lost"),
    ],
)
def test_broken_endpoints_are_one_line(capsys: pytest.CaptureFixture[str], answers: dict[str, tuple[int, object]], words: str) -> None:
    with serving(answers) as endpoint:
        assert chat(endpoint, "Hi") == 1
    assert words in capsys.readouterr().err
