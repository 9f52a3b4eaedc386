"""Growth under want of memory on a real cluster (F31): requests that cannot all be held at once all finish, each as if it were alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, running
from tests.faults.mixed_load import REQUEST_TIMEOUT_S, Heard, ask, check, prepare

BLOCK_SIZE = 16
NUM_BLOCKS = 11
"""176 tokens: about 1.2 times the longest question."""
MAX_PREEMPTIONS = 8
"""Of one request: each time it has got on by its headroom at least."""


@pytest.mark.slow
@pytest.mark.parametrize("headroom_tokens", [0, 16])
async def test_more_requests_than_the_pool_holds_all_finish_right(headroom_tokens: int, tmp_path: Path) -> None:
    settings = {
        "kv.block_size": str(BLOCK_SIZE),
        "kv.num_blocks": str(NUM_BLOCKS),
        "kv.headroom_tokens": str(headroom_tokens),
        "router.queue_timeout_s": "200",
    }
    with running(tmp_path, prefill=1, decode=1, dtype="bfloat16", settings=settings) as cluster:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_TIMEOUT_S * 2, limits=limits) as client:
            questions = await prepare(client, 21, 24, max_tokens=(16, 32), num_at_once=1)
            heard: list[Heard] = await asyncio.gather(*(ask(client, question.body) for question in questions))
        for question, one in zip(questions, heard, strict=True):
            check(question, one)
        preempted = _preemptions(cluster)
        print(f"headroom {headroom_tokens}: preempted {sorted(preempted)}")
        assert max(preempted) <= MAX_PREEMPTIONS


def _preemptions(cluster: Cluster) -> list[int]:
    """Of each recent request: how often it had to move for want of blocks."""
    recent = httpx.get(f"{cluster.url}/internal/v1/requests", timeout=10).raise_for_status().json()["requests"]
    return [sum(attempt["left_because"] == "preempted" for attempt in request["attempts"]) for request in recent]
