"""Real processes: the next turn of a conversation is computed where it decodes, because workers told the router what they have cached."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.accuracy.test_sparse_invariance import DEEPSEEK
from tests.cluster import Cluster, running, wait_until
from tests.e2e.test_latents import SIZES
from tests.e2e.test_layouts_differ import COMMON

FIRST_TURN = list(range(1000, 1240))


def complete(cluster: Cluster, prompt: list[int]) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def decided(cluster: Cluster, kind: str, reason: str) -> float:
    return cluster.metric(cluster.url, "pd_serve_routing_decisions_total", kind=kind, reason=reason)


@pytest.mark.slow
def test_next_turn_is_computed_where_the_last_one_decoded(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**DEEPSEEK, **SIZES, "vocab_size": 20_480}))
    with running(tmp_path / "logs", model=str(model), settings={**COMMON, "router.local_prefill_max_tokens": "64"}) as cluster:
        complete(cluster, FIRST_TURN)
        assert decided(cluster, "disaggregated", "load") == 1
        wait_until(lambda: cluster.metric(cluster.url, "pd_serve_prefix_known_blocks") >= 2 * (len(FIRST_TURN) // 16), 10, "events")
        turn = [*FIRST_TURN, *range(2000, 2030)]
        answer = complete(cluster, turn)
        assert decided(cluster, "local", "short_uncached") == 1
        assert complete(cluster, turn) == answer
        cluster.assert_clean()
