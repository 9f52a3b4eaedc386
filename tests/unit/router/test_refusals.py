"""Requests that are turned away: shape, status and parameter, before any worker hears of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pd_serve.config import Config, RouterConfig, SecurityConfig
from pd_serve.errors import ConfigError
from pd_serve.protocol.control import REGISTER_PATH, STATUS_PATH, RegisterWorker
from pd_serve.protocol.link import Open, Role
from router.main import serve_router
from tests.fakes_worker import mock_worker
from tests.unit.router.cluster import chat_body, cluster, completion_body

BAD_CHAT: list[tuple[dict[str, object], str | None]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3000}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop_token_ids": [260]}, "stop_token_ids"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
]

BAD_COMPLETION: list[tuple[dict[str, object], str | None]] = [
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"logprobs": 6}, "logprobs"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, -1]}, None),
    ({"prompt": [1, 260]}, "prompt"),
    ({"prompt": [2**70]}, None),
    ({"prompt": None}, "prompt"),
    ({"messages": []}, "messages"),
]


async def test_bad_parameters_are_named_and_no_worker_hears(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker) as c:
        for path, make, cases in (("chat/completions", chat_body, BAD_CHAT), ("completions", completion_body, BAD_COMPLETION)):
            for fields, param in cases:
                response = await c.http.post(f"/v1/{path}", json=make(**fields))
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["type"] == "invalid_request_error"
                if param is not None:
                    assert error["param"] == param, (fields, error)
        assert await c.metric("pd_serve_requests_total", '{code="400"}') == len(BAD_CHAT) + len(BAD_COMPLETION)
    assert not worker.of(Open)


async def test_values_that_ask_for_nothing_are_accepted(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        response = await c.chat(
            tools=None, tool_choice="none", response_format={"type": "text"}, user="me", metadata={"a": "b"}, store=False, stop=None, n=None
        )
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"\x00" * 64, b'{"model":"tiny","prompt":"\\ud800"}', b"[" * 100_000]
)
async def test_damaged_bodies_are_400(tmp_path: Path, body: bytes) -> None:
    async with cluster(tmp_path, wait_ready=False) as c:
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await c.http.post(path, content=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model_and_path_and_method(tmp_path: Path) -> None:
    async with cluster(tmp_path, wait_ready=False) as c:
        response = await c.chat(model="other")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await c.http.get("/v1/models/other")).status_code == 404
        assert (await c.http.get("/v1/models/tiny")).json()["max_model_len"] is None
        response = await c.http.get("/v1/nothing")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
        response = await c.http.get("/v1/completions")
        assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_body_over_the_limit_is_413(tmp_path: Path) -> None:
    async with cluster(tmp_path, wait_ready=False, max_body_bytes=2048) as c:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1000

        for content in (b" " * 3000, endless()):
            response = await c.http.post("/v1/completions", content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


async def test_api_keys(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=SecurityConfig(api_keys=("sk-one", "sk-two"))) as c:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer sk-three"}, 401),
            ({"authorization": "Basic sk-one"}, 401),
            ({"authorization": "Bearer"}, 401),
            ({"authorization": "Bearer sk-two"}, 200),
        ):
            response = await c.http.post("/v1/completions", json=completion_body(), headers=headers)
            assert response.status_code == status
            assert (await c.http.get("/v1/models", headers=headers)).status_code == status
        body = (await c.complete()).json()
        assert body["error"]["code"] == "invalid_api_key"
        assert (await c.http.get("/health")).status_code == 200


async def test_control_needs_the_cluster_secret(tmp_path: Path) -> None:
    registration = RegisterWorker(worker_id="w", incarnation=1, address="http://127.0.0.1:1", role=Role.BOTH, ready=True)
    async with cluster(tmp_path, wait_ready=False, security=SecurityConfig(cluster_secret="hush")) as c:
        for headers in ({}, {"authorization": "Bearer no"}):
            assert (await c.http.get(STATUS_PATH, headers=headers)).status_code == 401
            assert (await c.http.post(REGISTER_PATH, content=registration.model_dump_json(), headers=headers)).status_code == 401
        good = {"authorization": "Bearer hush", "content-type": "application/json"}
        assert (await c.http.get(STATUS_PATH, headers=good)).status_code == 200
        for content in (b"\x00\xff", b'{"worker_id": 5}', b"{}", b'{"incarnation": 1e400}'):
            assert (await c.http.post(REGISTER_PATH, content=content, headers=good)).status_code == 400
        assert (await c.http.post(REGISTER_PATH, content=b"x" * 20_000, headers=good)).status_code == 413


@pytest.mark.parametrize(
    "fields",
    [{"address": "http://["}, {"address": "ftp://x:1"}, {"address": "http://x:99999"}, {"address": ""}, {"incarnation": 2**64}],
    ids=str,
)
async def test_registrations_of_what_cannot_be_a_worker_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    good = {"worker_id": "w", "incarnation": 1, "address": "http://127.0.0.1:1", "role": "both", "ready": True}
    async with cluster(tmp_path, wait_ready=False) as c:
        assert (await c.http.post(REGISTER_PATH, json={**good, **fields})).status_code == 400
        assert (await c.http.post(REGISTER_PATH, json=good)).status_code == 200


async def test_addresses_of_workers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.pool.MAX_ADDRESSES", 3)
    async with cluster(tmp_path, wait_ready=False) as c:
        statuses = []
        for port in (1, 2, 3, 4, 1):
            worker = RegisterWorker(worker_id=f"w{port}", incarnation=1, address=f"http://127.0.0.1:{port}", role=Role.BOTH, ready=True)
            statuses.append((await c.http.post(REGISTER_PATH, json=worker.model_dump(mode="json"))).status_code)
        assert statuses == [200, 200, 200, 429, 200]


def test_listening_beyond_loopback_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="cluster_secret"):
        serve_router(Config(router=RouterConfig(host="0.0.0.0")))


async def test_random_bytes_on_the_port_do_no_harm(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        noise = random.Random(5)
        host, port = c.url.removeprefix("http://").split(":")
        for _ in range(20):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(noise.randbytes(200))
            writer.close()
        assert (await c.complete()).status_code == 200


async def test_openai_error_events_are_understood(tmp_path: Path) -> None:
    """The wrong key with the official client: its own error class."""
    openai = pytest.importorskip("openai")
    async with cluster(tmp_path, wait_ready=False, security=SecurityConfig(api_keys=("sk-one",))) as c, httpx.AsyncClient() as http:
        client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="sk-bad", http_client=http, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
