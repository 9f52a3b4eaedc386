"""2P2D under load: SIGKILL of a prefill and of a decode worker leaves the rest working and every table clean."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, running

PROMPTS = [[400 + index * 11 + offset for offset in range(40 + index * 3)] for index in range(16)]


async def _ask(client: httpx.AsyncClient, cluster: Cluster, prompt: list[int]) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    reply = await client.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_costs_no_answer(role: str, tmp_path: Path) -> None:
    with running(tmp_path, prefill=2, decode=2, settings={"kv.memory_bytes": str(256 * 1024 * 1024)}) as cluster:
        async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=64)) as client:
            expected = [await _ask(client, cluster, prompt) for prompt in PROMPTS[:4]]
            tasks = [asyncio.create_task(_ask(client, cluster, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(1.0)
            victim = await asyncio.to_thread(cluster.kill_worker, role)
            answers = await asyncio.gather(*tasks)
            assert answers[:4] == expected
            again = [await _ask(client, cluster, prompt) for prompt in PROMPTS[:8]]
        assert again == answers[:8]
        assert victim["id"] not in {worker["id"] for worker in cluster.workers() if worker["ready"]}
        cluster.assert_clean(timeout_s=15)
