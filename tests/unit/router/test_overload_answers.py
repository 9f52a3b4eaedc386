"""What clients are told under load: priority classes, limits of keys and their headers, 429 with Retry-After. Over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from pd_serve.config import OverloadConfig, SecurityConfig, TenantConfig
from pd_serve.protocol.link import Open, Role
from tests.fakes_worker import mock_worker
from tests.unit.router.cluster import Cluster, chat_body, cluster, completion_body, until

GOLD = {"authorization": "Bearer sk-gold"}
TIN = {"authorization": "Bearer sk-tin"}
TENANTS = SecurityConfig(
    tenants=(
        TenantConfig(name="gold", key="sk-gold"),
        TenantConfig(name="tin", key="sk-tin", requests_per_minute=3, tokens_per_minute=600),
    )
)


async def ask(c: Cluster, headers: dict[str, str], **fields: object) -> httpx.Response:
    return await c.http.post("/v1/completions", json=completion_body(**fields), headers=headers)


async def test_limits_of_a_key_are_told_and_kept(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=TENANTS) as c:
        first = await ask(c, TIN, prompt="x" * 100, max_tokens=8)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "600"
        assert 0 < int(first.headers["x-ratelimit-remaining-tokens"]) <= 500
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        streamed = await ask(c, TIN, prompt="x" * 100, max_tokens=8, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
        after = int(streamed.headers["x-ratelimit-remaining-tokens"])
        assert after <= 600 - 2 * 100 - 8 + 5, "the first answer's tokens count as well"
        refused = await ask(c, TIN, prompt="x" * 550, max_tokens=8)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 5 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "1", "what was not served does not count"
        assert (await ask(c, TIN, prompt="x")).status_code == 200
        refused = await ask(c, TIN, prompt="x")
        assert refused.status_code == 429
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        assert "sk-tin" not in refused.text
        never = await ask(c, GOLD, prompt="x" * 700)
        assert never.status_code == 200
        assert "x-ratelimit-limit-requests" not in never.headers
        assert await c.metric("pd_serve_rejections_total", '{reason="requests_per_minute"}') == 1
        assert await c.metric("pd_serve_rejections_total", '{reason="tokens_per_minute"}') == 1
        assert "sk-" not in (await c.http.get("/metrics")).text


async def test_a_request_above_a_minute_s_tokens_is_not_worth_a_retry(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=TENANTS) as c:
        refused = await ask(c, TIN, prompt="x" * 700)
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers


async def test_the_official_client_understands_and_waits_as_told(tmp_path: Path) -> None:
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=TENANTS) as c, httpx.AsyncClient() as http:
        client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="sk-tin", http_client=http, max_retries=0)
        for _ in range(3):
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert client._parse_retry_after_header(raised.value.response.headers) == pytest.approx(20, abs=1)


async def test_long_bodies_count_once(tmp_path: Path) -> None:
    """They are looked at twice: at once, and by the way that takes a while."""
    async with cluster(tmp_path, mock_worker(role=Role.BOTH), security=TENANTS) as c:
        answer = await ask(c, GOLD | {"authorization": "Bearer sk-tin"}, prompt=["x" * 100] * 25)
        assert answer.status_code == 429
        body = chat_body(messages=[{"role": "user", "content": "x"}], stop=["y" * 1000] * 3)
        answer = await c.http.post("/v1/chat/completions", json=body, headers=TIN)
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "2")


async def test_unknown_classes_are_refused_and_known_ones_go_in_their_order(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker) as c:
        refused = await ask(c, {"x-priority": "urgent"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-priority")
        worker.is_draining = True
        await until(lambda: c.services.pool.workers[0].load.draining, "nothing starts")
        tasks = []
        for name, prompt in (("low", "a"), ("normal", "aa"), ("low", "aaa"), ("high", "aaaa"), ("normal", "aaaaa")):
            tasks.append(asyncio.create_task(ask(c, {"x-priority": name}, prompt=prompt, max_tokens=4)))
            await until(lambda: c.services.dispatcher.num_queued == len(tasks), "queued")
        worker.is_draining = False
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        lengths = [len(frame.token_ids) for frame in worker.of(Open) if isinstance(frame, Open)]
        assert lengths == [lengths[0] + more for more in (0, -2, 1, -3, -1)]


async def test_each_class_has_its_own_part_of_the_queue(tmp_path: Path) -> None:
    worker = mock_worker(role=Role.BOTH)
    overload = OverloadConfig(max_queued=(2, 1, 0))
    async with cluster(tmp_path, worker, wait_ready=False, overload=overload, queue_timeout_s=0.3) as c:
        worker.is_draining = True
        await until(lambda: c.services.pool.workers and c.services.pool.workers[0].load.draining, "nothing starts")
        refused = await ask(c, {"x-priority": "low"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        tasks = [asyncio.create_task(ask(c, {"x-priority": name})) for name in ("normal", "high", "high")]
        await until(lambda: c.services.dispatcher.num_queued == 3, "queued")
        assert [(await ask(c, {"x-priority": name})).status_code for name in ("normal", "high")] == [429, 429]
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {503}
        assert await c.metric("pd_serve_rejections_total", '{reason="queue_full"}') == 3


async def test_a_prompt_that_would_come_too_late_is_turned_away_at_once(tmp_path: Path) -> None:
    """900 tokens are being computed, and do not come to an end: those behind are told how long that is likely to take."""
    worker = mock_worker(role=Role.BOTH)
    async with cluster(tmp_path, worker, slo_ttft_ms=100.0) as c:
        for _ in range(3):
            assert (await ask(c, {})).status_code == 200
        worker.script.stall_after = 0
        long = asyncio.create_task(ask(c, {}, prompt="x" * 900))
        await until(lambda: len(worker.of(Open)) == 4, "the long one is being computed")
        late = await ask(c, {}, prompt="short")
        assert (late.status_code, late.json()["error"]["code"]) == (429, "overloaded")
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert await c.metric("pd_serve_rejections_total", '{reason="predicted_ttft"}') == 1
        long.cancel()
        await until(c.services.dispatcher.is_empty, "gone")
        worker.script.stall_after = -1
        assert (await ask(c, {}, prompt="short")).status_code == 200
