"""Four router processes before the same workers find as much in their prefix caches as one does: each knows by the workers' own events.

A measurement with real processes, minutes long: conversations whose turns come over new connections, so that the kernel spreads them over
the router's processes. `-s` shows the numbers.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from tests.cluster import running

NUM_SESSIONS, NUM_TURNS, TURN_TOKENS = 16, 4, 96
SETTINGS = {"kv.memory_bytes": str(512 * 1024 * 1024), "router.policy": "cache_aware"}


async def hit_rate(url: str) -> float:
    """Share of prompt tokens that were cached. All sessions say their first turns, then their second ones, ..."""
    rng = random.Random(7)
    said: dict[int, list[int]] = {session: list(range(1000, 1064)) for session in range(NUM_SESSIONS)}
    cached = total = 0
    gate = asyncio.Semaphore(4)

    async def ask(prompt: list[int]) -> tuple[int, int]:
        async with gate, httpx.AsyncClient(timeout=120) as client:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            reply = await client.post(f"{url}/v1/completions", json=body)
        usage = reply.raise_for_status().json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    for _ in range(NUM_TURNS):
        for prompt in said.values():
            prompt += [rng.randrange(1000, 40_000) for _ in range(TURN_TOKENS)]
        for num_cached, num_tokens in await asyncio.gather(*map(ask, said.values())):
            cached, total = cached + num_cached, total + num_tokens
    return cached / total


@pytest.mark.slow
def test_four_router_processes_find_as_much_in_the_caches_as_one(tmp_path: Path) -> None:
    rates: dict[tuple[str, int], float] = {}
    for policy, processes in (("cache_aware", 1), ("cache_aware", 4), ("round_robin", 4)):
        settings = SETTINGS | {"router.policy": policy, "router.processes": str(processes)}
        with running(tmp_path / f"{policy}-{processes}", prefill=0, decode=0, colocated=3, settings=settings) as cluster:
            rates[policy, processes] = asyncio.run(hit_rate(cluster.url))
    print(f"\ncached share of prompt tokens: {rates}")
    assert rates["cache_aware", 4] > rates["cache_aware", 1] - 0.05
    assert rates["cache_aware", 4] > rates["round_robin", 4] + 0.1, "that the policy matters here at all"
