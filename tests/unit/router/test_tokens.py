"""/tokenize, /detokenize and /version."""

from __future__ import annotations

from pathlib import Path

from pd_serve import __version__
from pd_serve.config import SecurityConfig
from pd_serve.protocol.link import Role
from pd_serve.protocol.openai import Message
from tests.fakes import byte_ids
from tests.fakes_worker import mock_worker
from tests.unit.router.cluster import MODEL, cluster


async def test_text_to_tokens_and_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        told = (await c.http.post("/tokenize", json={"model": MODEL, "prompt": "né"})).json()
        assert told["tokens"] == list(byte_ids("né"))
        assert (told["count"], told["token_strs"]) == (3, None)
        assert told["max_model_len"] == c.services.limits().max_context_tokens > 0
        assert (await c.http.post("/detokenize", json={"tokens": told["tokens"]})).json() == {"prompt": "né"}
        strs = (await c.http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})).json()["token_strs"]
        assert strs == ["a", "b"]


async def test_a_chat_has_the_tokens_that_it_is_served_with(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    messages = [{"role": "user", "content": "hi"}]
    async with cluster(tmp_path, worker) as c:
        told = (await c.http.post("/tokenize", json={"messages": messages})).json()
        served = (await c.chat(messages=messages)).json()
        assert told["count"] == served["usage"]["prompt_tokens"]
        shown = (await c.http.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
        assert shown == c.services.codec.render_chat((Message(role="user", content="hi"),), {})
        without = (await c.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
        assert without["count"] < told["count"]


async def test_what_cannot_be_taken_is_refused(tmp_path: Path) -> None:
    security = SecurityConfig(api_keys=("k",))
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=security) as c:
        assert (await c.http.post("/tokenize", json={"prompt": "x"})).status_code == 401
        assert (await c.http.get("/version")).json() == {"version": __version__}
        c.http.headers["authorization"] = "Bearer k"
        for path, body, status, param in (
            ("/tokenize", {}, 400, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
            ("/tokenize", {"prompt": "x", "model": "another"}, 404, "model"),
            ("/detokenize", {"tokens": [10_000]}, 400, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
            ("/detokenize", {"tokens": [1] * 100_000}, 400, "tokens"),
        ):
            answer = await c.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body


async def test_more_tokens_than_the_context_are_refused_and_as_many_are_not(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        most = c.services.limits().max_context_tokens
        for num, status in ((most, 200), (most + 1, 400)):
            texts = await c.http.post("/tokenize", json={"prompt": "x" * num, "model": MODEL, "return_token_strs": True})
            tokens = await c.http.post("/detokenize", json={"tokens": [100] * num, "model": MODEL})
            assert (texts.status_code, tokens.status_code) == (status, status), (texts.text[:200], tokens.text[:200])
