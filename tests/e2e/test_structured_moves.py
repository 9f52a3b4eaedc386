"""A decode worker that is killed in the middle of answers that keep to a form costs none of them, and changes none."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from tests.cluster import Cluster, running, wait_until
from tests.fakes import write_tokenizer
from tests.faults.soak import MODEL
from tests.unit.engine.model_folders import write_config

EXPRESSION = "([a-f]{3}-[0-9]{2} ){40}"
SETTINGS = {"model.load_format": "random", "model.name": "demo", "kv.num_blocks": "1200", "engine.threads": "1"}


async def _ask(client: httpx.AsyncClient, cluster: Cluster, salt: int) -> str:
    prompt = [10 + (salt * 13 + offset) % 240 for offset in range(30)]
    body = {"model": "demo", "prompt": prompt, "max_tokens": 400, "temperature": 0, "guided_regex": EXPRESSION}
    reply = await client.post(f"{cluster.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    text: str = choice["text"]
    assert re.fullmatch(EXPRESSION, text)
    return text


def is_decoding(cluster: Cluster) -> bool:
    return any(worker["running"] for worker in cluster.workers() if worker["role"] == "decode")


@pytest.mark.slow
async def test_a_killed_decode_worker_changes_no_answer_of_a_form(tmp_path: Path) -> None:
    model = write_config(write_tokenizer(tmp_path / "model"), **MODEL, eos_token_id=0)
    with running(tmp_path, prefill=1, decode=2, model=str(model), settings=SETTINGS) as cluster:
        async with httpx.AsyncClient(timeout=240) as client:
            expected = await asyncio.gather(*(_ask(client, cluster, salt) for salt in range(8)))
            tasks = [asyncio.create_task(_ask(client, cluster, salt)) for salt in range(8)]
            await asyncio.to_thread(wait_until, lambda: is_decoding(cluster), 60, "answers are being decoded")
            await asyncio.to_thread(cluster.kill_worker, "decode")
            assert await asyncio.gather(*tasks) == expected
            assert cluster.metric(cluster.url, "pd_serve_moves_total") > 0
        cluster.assert_clean(timeout_s=15)
