"""`pd-serve up` with certificates: https for clients, control and registration, wss for links; status and chat beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from tests.cluster import Cluster, running
from tests.unit.engine.model_folders import write_config

SECRET = "secret-of-the-cluster"
UP_TIMEOUT_S = 100.0


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made(tmp_path_factory.mktemp("tls"))


def made(folder: Path) -> dict[str, str]:
    """Settings with an authority of its own and its certificate for 127.0.0.1."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    paths = {name: folder / f"{name}.pem" for name in ("tls_cert", "tls_key", "tls_ca")}
    certificate.cert_chain_pems[0].write_to_path(str(paths["tls_cert"]))
    certificate.private_key_pem.write_to_path(str(paths["tls_key"]))
    authority.cert_pem.write_to_path(str(paths["tls_ca"]))
    return {f"security.{name}": str(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tls: dict[str, str]) -> Iterator[Cluster]:
    settings = tls | {"security.cluster_secret": SECRET}
    with running(tmp_path_factory.mktemp("cluster"), dtype="bfloat16", settings=settings) as cluster:
        yield cluster


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pd_serve.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=UP_TIMEOUT_S, check=False)


def test_every_address_is_https_and_plain_http_is_not_answered(cluster: Cluster) -> None:
    workers = cluster.workers()
    assert {worker["role"] for worker in workers} == {"prefill", "decode"}
    for address in (cluster.url, *(worker["address"] for worker in workers)):
        assert address.startswith("https://")
        assert httpx.get(f"{address}/ready", verify=cluster.tls).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{address}/ready")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{address.replace('https', 'http')}/ready")
    assert all(peer["joined"] for worker in workers for peer in worker["peers"])


def test_an_answer_is_prefilled_by_one_worker_and_decoded_by_the_other(cluster: Cluster) -> None:
    before = cluster.metric(cluster.url, "pd_serve_routing_decisions_total", kind="disaggregated")
    body = {"model": "demo", "prompt": list(range(1000, 1100)), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, verify=cluster.tls)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 6
    assert cluster.metric(cluster.url, "pd_serve_routing_decisions_total", kind="disaggregated") == before + 1


def test_status_and_chat_work_with_the_settings_that_up_has_written(cluster: Cluster) -> None:
    told = cli("status", "--json", "--router", cluster.url, "--config", str(cluster.log_dir / "router.toml"))
    assert (told.returncode, told.stderr) == (0, "")
    assert all(worker["ready"] for worker in json.loads(told.stdout)["workers"])
    options = ("--temperature", "0", "--max-tokens", "8", "--set", f"security.tls_ca={cluster.settings['security.tls_ca']}")
    answer = cli("chat", "--url", cluster.url, *options, "The capital of France is?")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.strip()


def test_status_and_chat_with_another_authority_say_so_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    wrong = ("--set", f"security.tls_ca={made(tmp_path)['security.tls_ca']}")
    for refused in (cli("status", "--router", cluster.url, *wrong), cli("chat", "--url", cluster.url, *wrong, "Hi")):
        assert refused.returncode == 1
        (line,) = refused.stderr.splitlines()
        assert "not trusted" in line
        assert "security.tls_ca" in line


def test_up_with_a_certificate_of_another_authority_ends_at_once_and_says_so(tls: dict[str, str], tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", vocab_size=512, max_position_embeddings=1024)
    folder = tmp_path / "another"
    folder.mkdir()
    settings = tls | {"security.tls_ca": made(folder)["security.tls_ca"], "model.load_format": "random"}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    options = ("--model", str(model), "--device", "cpu", "--port", "0", "--log-dir", str(tmp_path / "logs"))
    refused = cli("up", "--json", *options, *sets)
    assert refused.returncode == 1
    assert not refused.stdout
    last = refused.stderr.splitlines()[-1]
    assert "not trusted" in last
    assert "security.tls_ca" in last
