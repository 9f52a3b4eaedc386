"""What `pd-serve up` decides to start: counts, ports, threads, devices, settings of each process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pd_serve.cli.launch_plan import LaunchPlan, Machine, child_env, plan_launch
from pd_serve.config_sources import Flag, Sources
from pd_serve.errors import ConfigError
from tests.ports import free_ports

TWO_CORES = Machine(num_cores=2, gpus=())


def plan(*sets: str, machine: Machine = TWO_CORES, resolved: list[tuple[str, str]] | None = None) -> LaunchPlan:
    def resolve(model_id: str, cache_dir: str) -> Path:
        if resolved is not None:
            resolved.append((model_id, cache_dir))
        return Path("/models") / model_id

    sources = Sources(sets=sets, flags=(Flag("--port", "router.port", 0),))
    return plan_launch(sources, machine, resolve)


def test_default_is_one_prefill_and_one_decode_that_register_at_the_router() -> None:
    made = plan()
    assert [(worker.role, worker.name) for worker in made.workers] == [("prefill", "prefill-0"), ("decode", "decode-0")]
    for worker in made.workers:
        assert worker.config.worker.routers == (made.router.address,)
        assert worker.address == f"http://127.0.0.1:{worker.config.worker.port}"


def test_ports_are_different_and_real() -> None:
    made = plan("launch.prefill=8", "launch.decode=8")
    ports = [process.address.rpartition(":")[2] for process in made.processes]
    assert len(set(ports)) == 17
    assert "0" not in ports


def test_taken_port_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            plan(f"router.port={port}")


def test_fixed_worker_port_counts_up_and_must_not_meet_another() -> None:
    port = free_ports(2)[0]
    made = plan("launch.prefill=2", "launch.decode=1", f"prefill.worker.port={port}")
    assert [worker.config.worker.port for worker in made.workers[:2]] == [port, port + 1]
    with pytest.raises(ConfigError, match="cannot listen"):
        plan(f"prefill.worker.port={port}", f"decode.worker.port={port}")


def test_threads_are_divided_and_a_setting_is_kept() -> None:
    made = plan("launch.prefill=1", "launch.decode=2", "decode.engine.threads=7", machine=Machine(8, ()))
    assert [worker.num_threads for worker in made.workers] == [3, 7, 7]
    assert [worker.env["OMP_NUM_THREADS"] for worker in made.workers] == ["3", "7", "7"]
    assert {worker.env["OMP_WAIT_POLICY"] for worker in made.workers} == {"PASSIVE"}
    assert [worker.num_threads for worker in plan("launch.decode=3").workers] == [1, 1, 1, 1]


def test_gpus_are_dealt_out_to_workers_that_may_use_them() -> None:
    gpus = Machine(8, ("0", "1"))
    made = plan("launch.decode=2", machine=gpus)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0", "1", "0"]
    assert all("CUDA_VISIBLE_DEVICES" not in worker.env for worker in plan("engine.device=cpu", machine=gpus).workers)


def test_every_rank_has_a_device_and_its_part_of_the_workers_cores() -> None:
    gpus = Machine(8, ("0", "1", "2"))
    made = plan("launch.decode=1", "prefill.tp=2", machine=gpus)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0,1", "2"]
    assert [worker.config.engine.tp for worker in made.workers] == [2, 1]
    assert [worker.num_threads for worker in made.workers] == [2, 4]
    with pytest.raises(ConfigError, match="needs as many devices, there are 3"):
        plan("decode.tp=4", machine=gpus)


def test_role_settings_reach_their_role_only() -> None:
    made = plan("prefill.kv.block_size=32", "launch.colocated=1")
    assert [worker.config.kv.block_size for worker in made.workers] == [32, 16, 16]


def test_model_is_resolved_once_and_keeps_its_name() -> None:
    resolved: list[tuple[str, str]] = []
    made = plan("model.id=org/small", resolved=resolved)
    assert resolved == [("org/small", "")]
    assert {(process.config.model.id, process.config.model.name) for process in made.processes} == {("/models/org/small", "small")}


def test_secret_is_drawn_when_something_listens_beyond_loopback() -> None:
    assert {process.config.security.cluster_secret for process in plan().processes} == {""}
    drawn = {process.config.security.cluster_secret for process in plan("router.host=0.0.0.0").processes}
    assert len(drawn) == 1
    assert len(drawn.pop()) == 64
    given = plan("router.host=0.0.0.0", "security.cluster_secret=mine")
    assert {process.config.security.cluster_secret for process in given.processes} == {"mine"}


def test_router_on_every_interface_is_reached_by_loopback() -> None:
    assert plan("router.host=0.0.0.0").router.address.startswith("http://127.0.0.1:")


def test_nothing_that_decodes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing would decode"):
        plan("launch.decode=0")


def test_children_do_not_merge_settings_again() -> None:
    assert child_env({"PD_SERVE_KV_BLOCK_SIZE": "1", "HOME": "/h"}, {"OMP_NUM_THREADS": "2"}) == {"HOME": "/h", "OMP_NUM_THREADS": "2"}
