"""TLS between clients, router and workers, with an authority made here: covered by it, all works; by another, nothing is said."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from pd_serve.config import Config, ModelConfig, RouterConfig, SecurityConfig
from pd_serve.errors import ConfigError, PeerLostError, ProtocolError
from pd_serve.ids import RouterId
from pd_serve.protocol.client import ControlClient, LinkSettings, open_link
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.link import Role
from pd_serve.tls import client_tls, server_tls
from router.main import create_app
from router.services import Services
from router.tokenizer import FolderTokenizer
from tests.fakes import serving, write_tokenizer
from tests.fakes_worker import mock_worker
from tests.patience import PATIENCE_S
from tests.unit.router.cluster import MODEL, completion_body, until
from workers.front_registration import Registrar, RegistrarSettings

SECRET = "hush"
FRONT_TESTS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Authority:
    security: SecurityConfig

    @staticmethod
    def made(folder: Path) -> Authority:
        """With a certificate for 127.0.0.1."""
        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(str(key))
        authority.cert_pem.write_to_path(str(ca))
        return Authority(SecurityConfig(cluster_secret=SECRET, tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca)))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    return Authority.made(tmp_path_factory.mktemp("ours")).security


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    return Authority.made(tmp_path_factory.mktemp("another")).security


async def test_clients_links_registration_and_control_go_over_tls(tmp_path: Path, ours: SecurityConfig) -> None:
    worker = mock_worker(role=Role.BOTH)
    codec = FolderTokenizer(write_tokenizer(tmp_path / "model"))
    app = create_app(Config(model=ModelConfig(name=MODEL), router=RouterConfig(), security=ours), codec)
    async with serving(worker, lifespan="off", tls=server_tls(ours)) as worker_url, serving(app, tls=server_tls(ours)) as url:
        assert (worker_url.split(":")[0], url.split(":")[0]) == ("https", "https")
        services: Services = app.state.services
        me = RegisterWorker(worker_id="decode-0", incarnation=1, address=worker_url, role=Role.BOTH, ready=True)
        registrar = Registrar(url, RegistrarSettings(SECRET, 0.1, client_tls(ours)), lambda: me, lambda router: False)
        registering = asyncio.create_task(registrar.run())
        await until(lambda: not services.why_not_ready(), "registered and linked")
        async with httpx.AsyncClient(base_url=url, verify=client_tls(ours)) as http:
            assert (await http.post("/v1/completions", json=completion_body())).status_code == 200
        async with ControlClient(url, SECRET, tls=client_tls(ours)) as control:
            (status,) = (await control.router_status()).workers
            assert status.address == worker_url
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)


async def test_nobody_talks_to_a_server_of_another_authority_or_without_tls(
    ours: SecurityConfig, another: SecurityConfig, caplog: pytest.LogCaptureFixture
) -> None:
    worker = mock_worker()
    async with serving(worker, lifespan="off", tls=server_tls(another)) as url:
        for address in (url, url.replace("https", "http")):
            settings = LinkSettings(RouterId("r"), SECRET, connect_timeout_s=PATIENCE_S, tls=client_tls(ours))
            with pytest.raises((PeerLostError, ProtocolError), match=r"security\.tls_ca" if address == url else None):
                await open_link(address, settings, lambda link, frame: None, lambda link, reason: None)
        with pytest.raises(PeerLostError, match=r"security\.tls_ca"):
            await ControlClient(url, SECRET, tls=client_tls(ours)).router_status()
        me = RegisterWorker(worker_id="decode-0", incarnation=1, address=url, role=Role.BOTH, ready=True)
        registering = asyncio.create_task(Registrar(url, RegistrarSettings(SECRET, 0.1, client_tls(ours)), lambda: me, bool).run())
        await until(lambda: "security.tls_ca" in caplog.text, "the worker's log says what to set")
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
    assert not worker.num_links
    assert not worker.headers, "no secret was shown"


def test_a_front_serves_tls_and_logs_no_secret(tmp_path: Path, ours: SecurityConfig) -> None:
    from tests.unit.workers.test_front import RUN, wait_until

    log = tmp_path / "front.log"
    sets = [f"security.{name}={value}" for name, value in ours.model_dump().items() if isinstance(value, str)]
    sets += ["worker.routers=", "worker.report_interval_s=0.5"]
    env = {"FAKE_RANK": "", "TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("w") as file:
        command = [sys.executable, "-c", RUN, str(FRONT_TESTS / "fake_rank.py"), *sets]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    try:
        address = wait_until(lambda: log.read_text().partition("listens at ")[2].partition(",")[0], "the address")
        assert address.startswith("https://")
        with httpx.Client(base_url=address, verify=client_tls(ours), trust_env=False) as http:
            wait_until(lambda: http.get("/ready").status_code == 200, "ready")
            assert http.get("/control/status", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
            assert http.get("/control/status", headers={"Authorization": "Bearer almost-right"}).status_code == 401
        with pytest.raises(httpx.HTTPError):
            httpx.get(address.replace("https", "http") + "/health", trust_env=False)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    assert SECRET not in log.read_text()
    assert "almost-right" not in log.read_text()


@pytest.mark.parametrize(
    "security", [{"tls_cert": "x.pem"}, {"tls_key": "x.pem"}, {"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.pem"}], ids=str
)
def test_half_a_setting_or_a_missing_file_is_one_line(security: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        server_tls(SecurityConfig.model_validate(security))
    assert "\n" not in refused.value.message
    with pytest.raises(ConfigError):
        client_tls(SecurityConfig(tls_ca="/nowhere.pem"))


def test_old_protocols_are_refused(ours: SecurityConfig) -> None:
    context = server_tls(ours)
    assert context is not None
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
