"""Status and chat over TLS: with the authority they work, without it the one line says what to set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import trustme

from pd_serve.cli.app import run
from pd_serve.config import SecurityConfig
from pd_serve.protocol.control import STATUS_PATH
from pd_serve.tls import server_tls

sys.path.insert(0, str(Path(__file__).parent))
from endpoints import Endpoint, serving

CHUNK = json.dumps({"choices": [{"delta": {"content": "yes"}}]})
ANSWERS: dict[str, tuple[int, object]] = {
    STATUS_PATH: (200, {"router_id": "r", "model": "tiny", "open_requests": 0, "queued_requests": 0, "workers": []}),
    "/v1/models": (200, {"data": [{"id": "tiny"}]}),
    "/v1/chat/completions": (200, [CHUNK, "[DONE]"]),
}


def made(folder: Path, *names: str) -> SecurityConfig:
    """An authority of its own, with a certificate for these names."""
    folder.mkdir()
    authority = trustme.CA()
    certificate = authority.issue_cert(*names)
    cert, key, ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    certificate.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    return SecurityConfig(tls_cert=str(cert), tls_key=str(key), tls_ca=str(ca))


@pytest.fixture
def ours(tmp_path: Path) -> SecurityConfig:
    return made(tmp_path / "ours", "127.0.0.1")


def commands(endpoint: Endpoint, *more: str) -> list[list[str]]:
    return [["status", "--json", "--router", endpoint.url, *more], ["chat", "--url", endpoint.url, *more, "Hi"]]


def test_the_authority_comes_from_an_option_a_file_or_the_environment(
    ours: SecurityConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(f'[security]\ntls_ca = "{ours.tls_ca}"\n')
    with serving(ANSWERS, server_tls(ours)) as endpoint:
        for more in (["--set", f"security.tls_ca={ours.tls_ca}"], ["--config", str(file)]):
            assert [run(command) for command in commands(endpoint, *more)] == [0, 0]
        monkeypatch.setenv("PD_SERVE_SECURITY_TLS_CA", ours.tls_ca)
        assert [run(command) for command in commands(endpoint)] == [0, 0]
    out = capsys.readouterr().out
    assert out.count("yes\n") == 3
    assert out.count('"model":"tiny"') == 3


def test_a_certificate_that_is_not_trusted_is_one_line_with_the_setting(
    ours: SecurityConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    another = made(tmp_path / "another", "127.0.0.1")
    with serving(ANSWERS, server_tls(ours)) as endpoint:
        for more in ([], ["--set", f"security.tls_ca={another.tls_ca}"]):
            for command in commands(endpoint, *more):
                assert run(command) == 1
                (line,) = capsys.readouterr().err.splitlines()
                assert endpoint.url in line
                assert "not trusted" in line
                assert "security.tls_ca" in line
                assert "is it running" not in line


def test_a_certificate_for_another_name_is_not_called_untrusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = made(tmp_path / "theirs", "llm.example")
    with serving(ANSWERS, server_tls(theirs)) as endpoint:
        for command in commands(endpoint, "--set", f"security.tls_ca={theirs.tls_ca}"):
            assert run(command) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert "not valid for '127.0.0.1'" in line
            assert "security.tls_cert" in line


def test_https_to_a_port_without_tls_and_the_reverse_say_which_to_use(ours: SecurityConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ANSWERS) as plain, serving(ANSWERS, server_tls(ours)) as secured:
        for endpoint, wrong, right in ((plain, "https://", "begins with http://"), (secured, "http://", "begins with https://")):
            url = wrong + endpoint.url.partition("://")[2]
            for command in (["status", "--json", "--router", url], ["chat", "--url", url, "Hi"]):
                assert run(command) == 1
                (line,) = capsys.readouterr().err.splitlines()
                assert right in line
