"""The written files start the fleet that was chosen: they parse, every command line is one the CLI takes, every setting is one it knows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pd_serve.cli.app import app
from pd_serve.config import Config
from pd_serve.config_sources import RoleTable, Sources, load_config
from pd_serve.plan.candidates import Candidate, colocated, disaggregated
from pd_serve.plan.compose import Deployment, compose_yaml, fleet_toml, write_deployment
from pd_serve.plan.errors import PlanError
from pd_serve.plan.worker_model import WorkerModel

MODEL_ID = "Qwen/Qwen3-0.6B"


def worker(num_gpus: int) -> WorkerModel:
    return WorkerModel(
        name=f"toy x{num_gpus}",
        num_gpus=num_gpus,
        prefill=(0.0, 1e-4, 0.0),
        decode=(0.01, 0.0, 0.0),
        num_kv_tokens=100_000,
        kv_bytes_per_token=23_040,
        num_layers=30,
        max_batch_tokens=1024,
        max_running=64,
        handover_s=0.0,
    )


ROUTER = load_config(
    Sources(
        sets=("router.policy=cache_aware", "router.slo_ttft_ms=500", "roles.auto=true", "security.api_keys=sk-1", "engine.max_waiting=9")
    )
)
FLEETS = {
    "split": disaggregated(3, 2, worker(1), worker(2)),
    "colocated": colocated(4, worker(1), chunk_budget=256),
}


def deployment(candidate: Candidate, is_cuda: bool = True, model_id: str = MODEL_ID) -> Deployment:
    return Deployment(candidate, model_id, ROUTER, is_cuda, ("p99 within limits: 'yes' & no: #1",))


def composed(chosen: Deployment) -> dict[str, dict[str, Any]]:
    loaded = yaml.safe_load(compose_yaml(chosen))
    services: dict[str, dict[str, Any]] = loaded["services"]
    return services


def parse(arguments: list[str]) -> dict[str, Any]:
    root: Any = typer.main.get_command(app)
    name, *rest = arguments
    parameters: dict[str, Any] = root.commands[name].make_context(f"pd-serve {name}", rest).params
    return parameters


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("name", FLEETS)
def test_every_command_line_is_one_the_cli_takes(name: str, is_cuda: bool) -> None:
    found = composed(deployment(FLEETS[name], is_cuda))
    for service_name, service in found.items():
        if service_name == "room":
            continue
        options = parse([str(word) for word in service["command"]])
        assert options["host"] == "0.0.0.0"
        assert f":{options['port']}/" in service["healthcheck"]["test"][-1]
        assert "CLUSTER_SECRET" in service["environment"]["PD_SERVE_SECURITY_CLUSTER_SECRET"]
        mounts = [mount.split(":")[:2] for mount in service["volumes"]]
        assert ["./pd-serve.toml", str(options["config"])] in mounts
        if service_name != "router":
            assert list(options["router"]) == ["http://router:8000"]
            assert service["ipc"] == service["pid"] == "service:room"


def test_each_worker_on_cuda_has_devices_of_its_own() -> None:
    found = composed(deployment(FLEETS["split"]))
    workers = {name: service for name, service in found.items() if name not in ("room", "router")}
    assert list(workers) == ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"]
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in workers.values()]
    assert devices == [["0"], ["1"], ["2"], ["3", "4"], ["5", "6"]]
    assert [parse(service["command"])["tp"] for service in workers.values()] == [1, 1, 1, 2, 2]


def test_workers_on_a_cpu_are_replicas_and_their_pools_fit() -> None:
    found = composed(deployment(FLEETS["split"], is_cuda=False))
    assert [found[name]["deploy"]["replicas"] for name in ("prefill", "decode")] == [3, 2]
    assert int(found["room"]["shm_size"].removesuffix("gb")) * 2**30 >= 5 * 100_000 * 23_040
    assert found["router"]["image"] == "pd-serve:cpu"


@pytest.mark.parametrize("is_cuda", [True, False])
def test_settings_are_those_that_were_simulated(tmp_path: Path, is_cuda: bool) -> None:
    path = tmp_path / "pd-serve.toml"
    path.write_text(fleet_toml(deployment(FLEETS["split"], is_cuda)))
    base = load_config(Sources(file=path))
    prefill, decode = (load_config(Sources(file=path), role) for role in (RoleTable.PREFILL, RoleTable.DECODE))
    assert (base.launch.prefill, base.launch.decode, base.launch.colocated) == (3, 2, 0)
    assert (base.router.policy, base.router.slo_ttft_ms, base.roles.auto) == ("cache_aware", 500.0, True)
    assert (base.model.id, base.engine.device, base.engine.max_waiting) == (MODEL_ID, "cuda" if is_cuda else "cpu", 9)
    assert (prefill.engine.max_batch_tokens, decode.engine.max_running) == (1024, 64)
    assert (prefill.engine.tp, decode.engine.tp) == ((1, 2) if is_cuda else (1, 1))
    assert is_cuda or (decode.engine.threads, decode.kv.memory_bytes) == (2, 100_000 * 23_040)


def test_the_best_chunk_budget_is_the_step_of_colocated_workers(tmp_path: Path) -> None:
    path = tmp_path / "pd-serve.toml"
    path.write_text(fleet_toml(deployment(FLEETS["colocated"])))
    config = load_config(Sources(file=path), RoleTable.COLOCATED)
    assert config.engine.max_batch_tokens == 256
    assert (config.launch.prefill, config.launch.decode, config.launch.colocated) == (0, 0, 4)


def test_what_is_as_by_default_is_not_written() -> None:
    text = fleet_toml(deployment(FLEETS["split"]))
    sections = re.findall(r"^\[(.*)\]$", text, re.MULTILINE)
    assert sections == ["launch", "model", "engine", "router", "roles", "prefill.engine", "decode.engine"]


def test_no_secret_is_written() -> None:
    chosen = deployment(FLEETS["split"])
    assert "sk-1" not in fleet_toml(chosen) + compose_yaml(chosen)


def test_a_folder_is_mounted_and_named_by_its_place_in_the_container() -> None:
    found = composed(deployment(FLEETS["split"], model_id="/data/models/mine"))
    for name in ("router", "prefill-0", "decode-1"):
        assert "/data/models/mine:/models/mine:ro" in found[name]["volumes"]
        assert found[name]["environment"]["PD_SERVE_MODEL_ID"] == "/models/mine"


def test_stopping_leaves_time_to_drain() -> None:
    for service in composed(deployment(FLEETS["split"])).values():
        assert "command" not in service or not service["command"] or service["stop_grace_period"] == "45s"
    assert Config().worker.drain_deadline_s == 30


def test_files_are_written_together(tmp_path: Path) -> None:
    compose, settings = write_deployment(deployment(FLEETS["split"]), tmp_path / "new" / "folder")
    assert (compose.name, settings.name) == ("compose.yaml", "pd-serve.toml")
    assert f"./{settings.name}:" in compose.read_text()
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="cannot write"):
        write_deployment(deployment(FLEETS["split"]), tmp_path / "file")


def _compose() -> list[str]:
    """Of Docker's two programs the one that is here; empty without."""
    for program in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(program[0]):
            told = subprocess.run([*program, "version", "--short"], capture_output=True, text=True, check=False)
            if told.returncode == 0 and not told.stdout.startswith("1."):  # which knows no `name`, as in docker/ too
                return program
    return []


@pytest.mark.parametrize("is_cuda", [True, False])
def test_docker_takes_the_file(tmp_path: Path, is_cuda: bool) -> None:
    program = _compose()
    if not program:
        pytest.skip("no docker compose here")
    compose, _ = write_deployment(deployment(FLEETS["split"], is_cuda), tmp_path)
    command = [*program, "-f", str(compose), "config", "--quiet"]
    ran = subprocess.run(command, env={**os.environ, "CLUSTER_SECRET": "x"}, capture_output=True, text=True, check=False, timeout=30)
    assert ran.returncode == 0, ran.stderr
    without = {name: value for name, value in os.environ.items() if name != "CLUSTER_SECRET"}
    refused = subprocess.run(command, env=without, capture_output=True, text=True, check=False, timeout=30)
    assert refused.returncode != 0
    assert re.search("CLUSTER_SECRET", refused.stderr)
