"""2P2D under load: SIGKILL of a decode worker and then of a prefill worker leaves the rest working and every table clean."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.cluster import Cluster, running, wait_until
from tests.faults.soak import MODEL
from tests.unit.engine.model_folders import write_config

NUM_TOKENS = 120
SETTINGS = {"model.load_format": "random", "model.name": "demo", "kv.num_blocks": "1200", "engine.threads": "1"}


def prompts(salt: int) -> list[list[int]]:
    """Of which nothing is cached yet."""
    return [[400 + 1000 * salt + index * 11 + offset for offset in range(40 + index * 20)] for index in range(16)]


async def _ask(client: httpx.AsyncClient, cluster: Cluster, prompt: list[int]) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    reply = await client.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def is_busy(cluster: Cluster) -> bool:
    return any(worker["running"] for worker in cluster.workers())


async def test_a_killed_worker_costs_no_answer(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", **MODEL)
    with running(tmp_path, prefill=2, decode=2, model=str(model), settings=SETTINGS) as cluster:
        async with httpx.AsyncClient(timeout=240, limits=httpx.Limits(max_connections=64)) as client:
            for salt, role in enumerate(("decode", "prefill")):
                asked = prompts(salt)
                expected = await asyncio.gather(*(_ask(client, cluster, prompt) for prompt in asked[:4]))
                tasks = [asyncio.create_task(_ask(client, cluster, prompt)) for prompt in asked]
                await asyncio.to_thread(wait_until, lambda: is_busy(cluster), 60, "requests run")
                victim = await asyncio.to_thread(cluster.kill_worker, role)
                answers = await asyncio.gather(*tasks)
                assert answers[:4] == expected
                assert await asyncio.gather(*(_ask(client, cluster, prompt) for prompt in asked[:8])) == answers[:8]
                assert victim["id"] not in {worker["id"] for worker in cluster.workers() if worker["ready"]}
        cluster.assert_clean(timeout_s=15)
