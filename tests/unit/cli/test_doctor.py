"""Doctor: each check says what is wrong and what to do about it."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from pd_serve.cli import doctor
from pd_serve.cli.app import run
from pd_serve.cli.doctor import Finding, State
from pd_serve.config import Config
from pd_serve.config_sources import Sources, load_config
from tests.unit.engine.model_folders import write_checkpoint, write_config


def config(*sets: str) -> Config:
    return load_config(Sources(sets=("engine.device=cpu", *sets)))


def test_json_lists_every_check_and_the_exit_code_says_whether_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        ["doctor", "--json", "--port", "0", "--set", "transport.name=loopback", "--set", "kv.memory_bytes=1048576", "--device", "cpu"]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    assert len(report["checks"]) == len(doctor.CHECKS)
    assert all(set(check) == {"name", "state", "detail", "remedy"} for check in report["checks"])


def test_what_must_be_mended_fails_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--set", "transport.name=loopback", "--set", "kv.memory_bytes=1048576", "--device", "cpu")
    assert run(["doctor", "--model", "/no/such/folder", "--port", "0", *small]) == 1
    text = capsys.readouterr().out
    assert "To be mended: model" in text
    assert "name a local folder" in text


@pytest.mark.parametrize(
    ("finding", "name"),
    [
        (lambda: doctor.check_memory(config(f"kv.memory_bytes={1 << 50}")), "memory"),
        (lambda: doctor.check_shared_memory(config(f"kv.memory_bytes={1 << 50}")), "/dev/shm"),
        (lambda: doctor.check_ucx(config("transport.lanes=rdma")), "ucx"),
        (lambda: doctor.check_model(config("model.id=nothing-of-this-name")), "model"),
    ],
)
def test_failures_name_a_remedy(finding: object, name: str) -> None:
    assert callable(finding)
    found = finding()
    assert isinstance(found, Finding)
    assert (found.name, found.state) == (name, State.FAIL)
    assert found.remedy


def test_nixl_is_opened_as_a_worker_would() -> None:
    found = doctor.check_nixl(config("transport.name=nixl"))
    if importlib.util.find_spec("nixl_cu12") is None:
        assert found.state is State.FAIL
        assert "nixl" in found.remedy
    else:
        assert found.state is State.OK, found.detail
        assert "tcp" in found.detail
    assert doctor.check_nixl(config()).detail == "not needed with transport.name = ucx"


def test_ucx_is_opened_as_a_worker_would() -> None:
    pytest.importorskip("libucx", reason="the ucx extra is not installed")
    found = doctor.check_ucx(config())
    assert found.state is State.OK
    assert "tcp" in found.detail


def test_taken_port_is_found() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = doctor.check_ports(config(f"router.port={taken.getsockname()[1]}"))
    assert found.state is State.FAIL
    assert "--port" in found.remedy


def test_model_folder_without_whole_weights_is_found(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert doctor.check_model(config(f"model.id={tmp_path}")).state is State.FAIL
    assert doctor.check_model(config(f"model.id={tmp_path}", "model.load_format=random")).state is State.OK
    (tmp_path / "model.safetensors").touch()
    assert "truncated" in doctor.check_model(config(f"model.id={tmp_path}")).detail
    write_checkpoint(tmp_path)
    assert doctor.check_model(config(f"model.id={tmp_path}")).state is State.OK
    write_config(tmp_path, architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in doctor.check_model(config(f"model.id={tmp_path}", "model.load_format=random")).detail


def test_listening_beyond_loopback_without_a_secret_is_noted() -> None:
    assert doctor.check_security(config("router.host=0.0.0.0")).state is State.NOTE
    assert doctor.check_security(config("router.host=0.0.0.0", "security.cluster_secret=x")).state is State.OK


def test_cuda_without_a_driver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "query_gpus", tuple)
    assert doctor.check_gpu(load_config(Sources(sets=("engine.device=cuda",)))).state is State.FAIL
    assert doctor.check_gpu(config()).state is State.NOTE
