"""Ids of requests, the phases of one, and web pages of other origins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.protocol.control import REQUESTS_PATH, RecentRequests
from pd_serve.protocol.link import Role
from router.cors import Cors
from router.phases import MAX_NBYTES, phases_json
from router.request_head import head_of
from router.timeline import Timeline
from tests.fakes_worker import mock_worker
from tests.unit.router.cluster import chat_body, cluster, completion_body

PAGE = "https://chat.example.org"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/nowhere"])
async def test_an_id_comes_back_in_every_answer(tmp_path: Path, path: str) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        for body in ({"prompt": "x"}, chat_body(), b"no json"):
            asked = {"content": body} if isinstance(body, bytes) else {"json": body}
            method = "GET" if "models" in path else "POST"
            response = await c.http.request(method, path, headers={"x-request-id": "abc-1"}, **asked)  # type: ignore[arg-type]
            assert response.headers.get_list("x-request-id") == ["abc-1"]
            response = await c.http.request(method, path, **asked)  # type: ignore[arg-type]
            assert response.headers["x-request-id"].startswith("req_")


async def test_an_id_names_the_request_in_the_routers_record(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        for stream in (False, True):
            body = completion_body(n=2, stream=stream)
            assert (await c.http.post("/v1/completions", json=body, headers={"x-request-id": f"mine-{stream}"})).status_code == 200
        recent = RecentRequests.model_validate_json((await c.http.get(REQUESTS_PATH)).content)
    assert [told.request_id for told in recent.requests] == ["mine-True"] * 2 + ["mine-False"] * 2


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"with space", b"bell\x07", b"\xff"])
def test_an_id_that_is_too_long_or_not_printable_is_replaced(given: bytes) -> None:
    head = head_of({"headers": [(b"x-request-id", given)]}, None)
    assert head.request_id.startswith("req_")
    assert given not in head.lines or not given


async def test_the_phases_come_in_a_header_or_in_a_comment(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        asked = {"x-request-timeline": "1", "x-request-id": "r"}
        whole = await c.http.post("/v1/chat/completions", json=chat_body(n=2), headers=asked)
        streamed = await c.http.post("/v1/chat/completions", json=chat_body(stream=True), headers=asked)
        plain = await c.http.post("/v1/chat/completions", json=chat_body(stream=True))
    told = json.loads(whole.headers["x-request-timeline"])
    assert (told["request_id"], len(told["choices"])) == ("r", 2)
    (attempt,) = told["choices"][0]["attempts"]
    assert 0 <= attempt["began_s"] <= attempt["first_token_s"] <= told["choices"][0]["ended_s"]
    *_, comment, done = streamed.text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(comment.removeprefix(": x-request-timeline "))["choices"][0]["outcome"] == "length"
    assert "timeline" not in plain.text


def test_phases_of_many_choices_stay_short() -> None:
    timeline = Timeline()
    records = []
    for key in range(200):
        timeline.arrived(key, 1, 0.0)
        record = timeline.named(key, "r")
        assert record is not None
        records.append(record)
    told = phases_json("r", records)
    assert len(told) < MAX_NBYTES + 200
    assert json.loads(told)["left_out"] == 200 - len(json.loads(told)["choices"]) > 0
    timeline.ended(0, "stop", 1, 1.0)
    assert timeline.named(0, "r") is None


async def test_pages_of_configured_origins_may_ask(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), cors_origins=(PAGE,)) as c:
        question = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await c.http.options("/v1/chat/completions", headers=question)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        assert (await c.http.options("/v1/models", headers=question | {"origin": "https://elsewhere"})).status_code == 400
        for response in (
            await c.http.post("/v1/chat/completions", json=chat_body(), headers={"origin": PAGE}),
            await c.http.post("/v1/chat/completions", json=chat_body(stream=True), headers={"origin": PAGE}),
            await c.http.post("/v1/chat/completions", json=chat_body(n=0), headers={"origin": PAGE}),
            await c.http.get("/v1/models", headers={"origin": PAGE}),
        ):
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
        other = await c.http.post("/v1/chat/completions", json=chat_body(), headers={"origin": "https://elsewhere"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_origins_no_page_may_ask(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH)) as c:
        preflight = await c.http.options("/v1/models", headers={"origin": PAGE, "access-control-request-method": "GET"})
        assert preflight.status_code == 405
        assert "access-control-allow-origin" not in (await c.http.get("/v1/models", headers={"origin": PAGE})).headers


def test_any_origin() -> None:
    assert b"access-control-allow-origin: *\r\n" in Cors(("*",)).lines(b"https://a")
