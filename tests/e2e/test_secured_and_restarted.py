"""A cluster with keys and a secret, of random weights without a tokenizer, whose processes are killed and come back on their ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from pd_serve.wire import PROTOCOL_VERSION
from tests.cluster import Cluster, running, wait_until
from tests.unit.engine.model_folders import write_config

KEY, OTHER_KEY, SECRET = "key-of-one-client", "key-of-another", "secret-of-the-cluster"
HEARTBEAT_S = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("secured")
    model = write_config(folder / "model", vocab_size=512, max_position_embeddings=1024)
    settings = {
        "model.load_format": "random",
        "model.name": "demo",
        "kv.memory_bytes": str(16 * 1024 * 1024),
        "worker.heartbeat_s": str(HEARTBEAT_S),
        "security.api_keys": f"{KEY},{OTHER_KEY}",
        "security.cluster_secret": SECRET,
    }
    with running(folder, model=str(model), restart=True, settings=settings) as cluster:
        yield cluster


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def complete(cluster: Cluster, headers: dict[str, str]) -> httpx.Response:
    body = {"model": "demo", "prompt": list(range(100, 150)), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)


def answer(cluster: Cluster) -> str:
    reply = complete(cluster, bearer(KEY))
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_clients_need_a_key(cluster: Cluster) -> None:
    for key in (KEY, OTHER_KEY):
        assert complete(cluster, bearer(key)).status_code == 200
        assert httpx.get(f"{cluster.url}/v1/models", headers=bearer(key)).status_code == 200
    for headers in ({}, bearer("wrong"), bearer(SECRET), {"Authorization": KEY}):
        refused = complete(cluster, headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{cluster.url}/v1/models", headers=headers).status_code == 401


def test_links_and_control_need_the_secret_and_probes_need_nothing(cluster: Cluster) -> None:
    addresses = [worker["address"] for worker in cluster.workers()]
    assert len(addresses) == 2
    for headers in ({}, bearer("wrong"), bearer(KEY)):
        assert httpx.get(f"{cluster.url}/internal/v1/status", headers=headers).status_code == 401
        assert httpx.post(f"{cluster.url}/internal/v1/workers", headers=headers, json={}).status_code == 401
        for address in addresses:
            for method, path in (("GET", "status"), ("GET", "traces"), ("POST", "drain"), ("POST", "role")):
                body = {"role": "both"} if path == "role" else {}
                content = json.dumps(body) if method == "POST" else None
                reply = httpx.request(method, f"{address}/control/{path}", content=content, headers=headers)
                assert reply.status_code == 401, (path, reply.text)
            with pytest.raises(InvalidStatus) as refused:
                connect(
                    f"{address.replace('http', 'ws')}/link",
                    additional_headers=headers | {"X-PD-Router": "r", "X-PD-Protocol": str(PROTOCOL_VERSION)},
                )
            assert refused.value.response.status_code == 401
    for address in (cluster.url, *addresses):
        for path in ("health", "ready", "metrics"):
            assert httpx.get(f"{address}/{path}").status_code == 200
    for address in addresses:
        assert httpx.get(f"{address}/control/status", headers=bearer(SECRET)).status_code == 200
    assert answer(cluster)


def test_status_takes_the_secret_from_the_environment(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "pd_serve.cli", "status", "--json", "--router", cluster.url]
    without = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (without.returncode, len(without.stderr.splitlines())) == (1, 1)
    env = {**os.environ, "PD_SERVE_SECURITY_CLUSTER_SECRET": SECRET}
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert {worker["role"] for worker in json.loads(told.stdout)["workers"]} == {"prefill", "decode"}


def test_no_secret_is_in_a_log_and_settings_files_are_private(cluster: Cluster) -> None:
    for log in cluster.log_dir.glob("*.log"):
        text = log.read_text()
        assert not [secret for secret in (KEY, OTHER_KEY, SECRET) if secret in text], log
    for file in cluster.log_dir.glob("*.toml"):
        assert file.stat().st_mode & 0o077 == 0


def router_pid(cluster: Cluster) -> int:
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children()
    return next(child.pid for child in children if "router" in child.cmdline())


def test_a_router_that_was_killed_has_its_workers_back_within_a_heartbeat(cluster: Cluster) -> None:
    before, expected = identities(cluster), answer(cluster)
    pid = router_pid(cluster)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_up(cluster, "health"), 60, "the router listens again")
    wait_until(lambda: is_up(cluster, "ready") and len(cluster.workers()) == 2, HEARTBEAT_S + 2.0, "its workers are back")
    assert router_pid(cluster) != pid
    assert answer(cluster) == expected
    assert identities(cluster) == before
    cluster.assert_clean()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_was_killed_comes_back_as_another_and_serves(cluster: Cluster, role: str) -> None:
    expected, victim = answer(cluster), cluster.worker(role)
    os.kill(victim["rank_pids"][0], signal.SIGKILL)
    wait_until(lambda: (victim["id"], victim["incarnation"]) not in identities(cluster), 10, "the dead one is gone")
    wait_until(lambda: is_whole(cluster), 60, "another one has joined")
    assert answer(cluster) == expected
    cluster.assert_clean()
    assert f"{victim['id']} started again" in (cluster.log_dir / "up.log").read_text()


def is_up(cluster: Cluster, path: str) -> bool:
    try:
        return httpx.get(f"{cluster.url}/{path}", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def identities(cluster: Cluster) -> set[tuple[str, int]]:
    return {(worker["id"], worker["incarnation"]) for worker in cluster.workers()}


def is_whole(cluster: Cluster) -> bool:
    workers: list[dict[str, Any]] = cluster.workers()
    known = identities(cluster)
    return len(workers) == 2 and all(worker["ready"] and _joined(worker) & _names(known) for worker in workers)


def _joined(worker: dict[str, Any]) -> set[str]:
    return {peer["peer"] for peer in worker["peers"] if peer["joined"]}


def _names(known: set[tuple[str, int]]) -> set[str]:
    return {f"{worker_id}@{incarnation:016x}" for worker_id, incarnation in known}
