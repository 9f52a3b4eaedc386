"""The same tokens and the same log probabilities, bit for bit on one host, colocated and disaggregated, for every awkward prompt length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster, running

BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]
MIXED = [[3 * index + 600 + offset for offset in range(9 + 8 * index)] for index in range(8)]
NUM_TOKENS = 8
CITY = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 8}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def _prompt(length: int) -> list[int]:
    return [(37 * offset + 11) % 40000 + 100 for offset in range(length)]


async def _answers(cluster: Cluster, longest: int) -> list[Any]:
    async with httpx.AsyncClient(timeout=240) as client:

        async def ask(prompt: list[int]) -> Any:
            body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2, "ignore_eos": True}
            reply = await client.post(f"{cluster.url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            choice = reply.json()["choices"][0]
            return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]

        async def ask_in_form(question: str) -> Any:
            body = {"model": "demo", "prompt": question, "max_tokens": 40, "temperature": 0, "response_format": FORM}
            choice = (await client.post(f"{cluster.url}/v1/completions", json=body)).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert set(json.loads(choice["text"])) == {"capital", "large"}
            return choice

        alone = [await ask(_prompt(length)) for length in (*LENGTHS, longest)]
        in_form = await ask_in_form("As JSON, the capital of France: ")
        return [*alone, in_form, *await asyncio.gather(*(ask(prompt) for prompt in MIXED))]


@pytest.mark.parametrize(
    ("dtype", "chunks", "longest"),
    [
        ("float32", (7,), 100),
        ("bfloat16", (64,), 200),
        pytest.param("float32", (7, 64), 1000, marks=pytest.mark.slow),
        pytest.param("bfloat16", (7, 64), 1000, marks=pytest.mark.slow),
    ],
)
async def test_disaggregated_equals_colocated(dtype: str, chunks: tuple[int, ...], longest: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": dtype}
    pool = {"kv.memory_bytes": str(256 * 1024 * 1024)}
    with running(tmp_path / "colocated", prefill=0, decode=0, colocated=1, settings=pool, **options) as colocated:
        expected = await _answers(colocated, longest)
    for chunk in chunks:
        settings = {**pool, "prefill.engine.prefill_chunk": str(chunk), "transport.verify": "true"}
        with running(tmp_path / f"chunk{chunk}", settings=settings, **options) as cluster:
            assert await _answers(cluster, longest) == expected
