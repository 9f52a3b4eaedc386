"""1P1D with real processes and the real model: answers, the way their KV went, and cleanliness."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.cluster import CLEAN_TIMEOUT_S, Cluster, running, wait_until

KV_NBYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
"""SmolLM2-135M in float32: keys and values, 30 layers, 3 KV heads of 64."""

CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("one_one"), settings={"kv.memory_bytes": str(768 * 1024 * 1024)}) as cluster:
        yield cluster


def _complete(cluster: Cluster, prompt: list[int] | str, max_tokens: int) -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_chat_streams_a_sensible_answer(cluster: Cluster) -> None:
    body = {"model": "demo", "messages": CAPITAL, "max_tokens": 16, "temperature": 0, "stream": True}
    text, finish = "", None
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        choice = json.loads(line)["choices"][0]
        text += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
    assert "Paris" in text
    assert finish == "stop"
    whole = httpx.post(f"{cluster.url}/v1/chat/completions", json={**body, "stream": False}, timeout=60).json()
    assert whole["choices"][0]["message"]["content"] == text


def test_every_kv_byte_is_pushed_one_sided_into_reserved_blocks(cluster: Cluster) -> None:
    prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
    lane = next(peer for peer in prefill["peers"] if peer["peer"].startswith(decode["id"]))
    assert lane["one_sided"], lane
    cluster.assert_clean()
    before = cluster.settled_metric(prefill["address"], "pd_serve_kv_transfer_bytes_total")
    prompt = list(range(1000, 1123))
    _complete(cluster, prompt, 4)
    cluster.assert_clean()
    cluster.assert_counts(prefill["address"], "pd_serve_kv_transfer_bytes_total", before + len(prompt) * KV_NBYTES_PER_TOKEN)
    assert cluster.metric(decode["address"], "pd_serve_stale_records_total") == 0


def test_a_second_request_pushes_only_the_missing_suffix(cluster: Cluster) -> None:
    prefill = cluster.worker("prefill")
    prompt = list(range(3000, 3100))
    before = cluster.settled_metric(prefill["address"], "pd_serve_kv_transfer_bytes_total")
    first = _complete(cluster, prompt, 8)
    cluster.assert_clean()
    cluster.assert_counts(prefill["address"], "pd_serve_kv_transfer_bytes_total", before + 100 * KV_NBYTES_PER_TOKEN)
    second = _complete(cluster, prompt, 8)
    cluster.assert_clean()
    cluster.assert_counts(prefill["address"], "pd_serve_kv_transfer_bytes_total", before + (100 + 100 - 96) * KV_NBYTES_PER_TOKEN)
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_traced_transfer_runs_while_later_layers_are_computed(cluster: Cluster) -> None:
    prefill = cluster.worker("prefill")
    prompt = list(range(5000, 7000))
    _complete(cluster, prompt, 1)
    cluster.assert_clean()
    trace = httpx.get(f"{prefill['address']}/control/traces", params={"limit": 1}).json()["traces"][0]
    assert trace["num_tokens"] == len(prompt)
    pushes = trace["layers"]
    num_chunks = 1 + max(push["chunk"] for push in pushes)
    assert num_chunks > 1
    assert [(push["chunk"], push["layer"]) for push in pushes] == [(chunk, layer) for chunk in range(num_chunks) for layer in range(30)]
    for push, following in pairwise(pushes):
        assert push["kv_written_s"] <= push["push_start_s"] <= push["push_end_s"]
        assert push["kv_written_s"] < following["kv_written_s"], "layer by layer, as they are computed"
    behind_compute = [push["push_end_s"] < trace["compute_end_s"] for push in pushes]
    assert behind_compute[0]
    assert sum(behind_compute) > 0.5 * len(pushes), "most layers have arrived when the last has been computed"
    assert trace["overlap_ratio"] > 0.5
    assert sum(push["nbytes"] for push in pushes) == len(prompt) * KV_NBYTES_PER_TOKEN


def test_what_a_request_did_can_be_read_from_the_metrics(cluster: Cluster) -> None:
    prompt = list(range(7000, 7100))
    for _ in range(2):
        _complete(cluster, prompt, 4)
    cluster.assert_clean()
    prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
    lane = prefill["peers"][0]["lane"]
    for address, name, labels in (
        (prefill["address"], "pd_serve_kv_transfer_bytes_total", {"lane": lane}),
        (prefill["address"], "pd_serve_kv_transfer_seconds_count", {}),
        (prefill["address"], "pd_serve_kv_overlap_ratio_count", {}),
        (prefill["address"], "pd_serve_computed_tokens_total", {"phase": "prefill"}),
        (prefill["address"], "pd_serve_joined_peers", {"lane": lane, "path": "one_sided"}),
        (prefill["address"], "pd_serve_peer_bandwidth_bytes_per_second", {"lane": lane}),
        (decode["address"], "pd_serve_computed_tokens_total", {"phase": "decode"}),
        (decode["address"], "pd_serve_handover_seconds_count", {}),
        (decode["address"], "pd_serve_prefix_cache_hit_tokens_total", {}),
        (decode["address"], "pd_serve_blocks", {"state": "cached"}),
        (decode["address"], "pd_serve_step_seconds_count", {}),
        (decode["address"], "pd_serve_links", {}),
        (cluster.url, "pd_serve_time_to_first_token_seconds_count", {}),
        (cluster.url, "pd_serve_inter_token_latency_seconds_count", {}),
        (cluster.url, "pd_serve_request_seconds_count", {}),
        (cluster.url, "pd_serve_requests_total", {"code": "200"}),
        (cluster.url, "pd_serve_routing_decisions_total", {"kind": "disaggregated"}),
        (cluster.url, "pd_serve_linked_workers", {"role": "decode"}),
    ):
        # Not at once: a worker tells of what it has counted when it becomes idle.
        read = partial(cluster.metric, address, name, **labels)
        wait_until(lambda read=read: read() > 0, CLEAN_TIMEOUT_S, f"{name} {labels} is counted")
    published = sum(worker["blocks"]["cached"] for worker in cluster.workers())
    assert published > 0
    wait_until(
        lambda: cluster.metric(cluster.url, "pd_serve_prefix_known_blocks") == published,
        CLEAN_TIMEOUT_S,
        "the router knows of every block that is published, and no other",
    )
    text = httpx.get(f"{decode['address']}/metrics").text
    assert all(f'pd_serve_leases{{state="{state}"}} 0.0' in text for state in ("granted", "quarantined"))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_first_token_can_be_the_last(cluster: Cluster, max_tokens: int) -> None:
    reply = _complete(cluster, "One two three", max_tokens)
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_sixty_four_concurrent_streams_finish_with_their_own_answers(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=80)) as client:

        async def ask(prompt: list[int]) -> str:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
            text = ""
            async with client.stream("POST", f"{cluster.url}/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text

        prompts = [[500 + index * 7 + offset for offset in range(5 + index // 2)] for index in range(64)]
        together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        alone = [await ask(prompt) for prompt in prompts[::8]]
    assert together[::8] == alone


async def test_a_client_that_leaves_frees_everything(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "demo", "prompt": list(range(2000, 2600)), "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}
        for delay_s in (0.05, 0.3, 1.5):
            task = asyncio.create_task(client.post(f"{cluster.url}/v1/completions", json=body))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    cluster.assert_clean()
