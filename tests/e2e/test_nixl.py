"""1P1D over NIXL, with real processes: the same tokens as over ucx would be, KV by one-sided writes, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pd_serve.errors import TransportUnavailableError
from pd_serve.transport.nixl.binding import NixlBinding
from tests.cluster import Cluster, running
from tests.unit.engine.model_folders import write_config

PROMPT = [3 + index % 90 for index in range(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        NixlBinding("127.0.0.1")
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    return write_config(tmp_path_factory.mktemp("model"), vocab_size=300)


@pytest.fixture(params=["auto", "tcp"])
def cluster(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Cluster]:
    settings = {"transport.name": "nixl", "transport.lanes": request.param, "model.load_format": "random", "kv.num_blocks": "64"}
    with running(tmp_path, model=str(model), settings=settings) as cluster:
        yield cluster


def _complete(cluster: Cluster, prompt: list[int]) -> str:
    body = {"model": cluster.status()["model"], "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = json.dumps(reply.json()["choices"][0]["text"])
    return text


def test_kv_goes_over_nixl_and_decodes_as_if_computed_there(cluster: Cluster) -> None:
    prefill = cluster.worker("prefill")
    (pair,) = cluster.status()["pairs"]
    lane = "tcp" if cluster.settings["transport.lanes"] == "tcp" else "cma"
    assert (pair["joined"], pair["lane"], pair["conversion"]) == (True, lane, "none")
    before = cluster.settled_metric(prefill["address"], "pd_serve_kv_transfer_bytes_total")
    first = _complete(cluster, PROMPT)
    cluster.assert_clean()
    # Keys and values, 2 layers, 2 heads of 8, float32.
    cluster.assert_counts(prefill["address"], "pd_serve_kv_transfer_bytes_total", before + len(PROMPT) * 2 * 2 * 2 * 8 * 4)
    # Now decode has the prompt's full blocks, and only the rest is sent.
    assert _complete(cluster, PROMPT) == first
    cluster.assert_clean()
    for worker in cluster.workers():
        assert cluster.metric(worker["address"], "pd_serve_stale_records_total") == 0
