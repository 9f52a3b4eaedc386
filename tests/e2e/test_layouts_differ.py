"""Real processes whose KV pools differ in block size, order and type: the answers are those of one worker alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import CLEAN_TIMEOUT_S, Cluster, running, wait_until
from tests.unit.engine.model_folders import write_config

SHAPE: dict[str, Any] = {"vocab_size": 20_480, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 1024}
COMMON = {"model.load_format": "random", "model.name": "demo", "transport.verify": "true", "engine.threads": "1"}
POOLS = {"kv.memory_bytes": str(8 * 1024 * 1024)}
PROMPTS = [[(37 * offset + 11 * number) % 20_000 + 3 for offset in range(length)] for number, length in enumerate((1, 16, 65, 300))]
PROMPTS.append(PROMPTS[-1][:200] + list(range(500, 560)))
NUM_TOKENS = 24

EXACT = {
    "prefill.kv.block_size": "16",
    "decode.kv.block_size": "64",
    "decode.kv.order": "head_major",
    "prefill.engine.prefill_chunk": "50",
}
CONVERTED = {
    "prefill.model.dtype": "bfloat16",
    "decode.model.dtype": "bfloat16",
    "decode.kv.dtype": "fp8_e4m3",
    "decode.kv.block_size": "8",
}


async def answers(cluster: Cluster) -> list[Any]:
    """One after the other, then all at once."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(prompt: list[int]) -> Any:
            body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            reply = await client.post(f"{cluster.url}/v1/completions", json={**body, "logprobs": 0})
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["logprobs"]["tokens"]

        return [await ask(prompt) for prompt in PROMPTS] + list(await asyncio.gather(*map(ask, PROMPTS)))


def all_was_packed(cluster: Cluster) -> bool:
    """Of the bytes that prefill has pushed."""
    address = cluster.worker("prefill")["address"]
    packed, pushed = (cluster.metric(address, f"pd_serve_kv_{name}_bytes_total") for name in ("packed", "transfer"))
    return 0 < packed == pushed


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path / "model", **SHAPE))


async def test_blocks_of_other_sizes_and_order_give_the_same_answers(model: str, tmp_path: Path) -> None:
    settings = {**COMMON, **POOLS}
    with running(tmp_path / "one", prefill=0, decode=0, colocated=1, model=model, settings=settings) as colocated:
        expected = await answers(colocated)
    with running(tmp_path / "two", model=model, settings={**settings, **EXACT}) as cluster:
        assert await answers(cluster) == expected
        cluster.assert_clean()
        wait_until(lambda: all_was_packed(cluster), CLEAN_TIMEOUT_S, "all that was pushed was packed")
        assert cluster.metric(cluster.url, "pd_serve_moves_total") == 0


async def test_a_pool_of_eight_bits_is_filled_by_a_worker_of_sixteen(model: str, tmp_path: Path) -> None:
    settings = {**COMMON, **POOLS, **CONVERTED}
    with running(tmp_path / "two", model=model, dtype="bfloat16", settings=settings) as cluster:
        first = await answers(cluster)
        assert first == await answers(cluster), "whatever is cached by now"
        cluster.assert_clean()
        wait_until(lambda: all_was_packed(cluster), CLEAN_TIMEOUT_S, "all that was pushed was packed")
        assert cluster.metric(cluster.url, "pd_serve_moves_total") == 0
