"""What a front gives each rank of its worker, and how it tells their ends."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest

from pd_serve.config import Config
from pd_serve.errors import ConfigError
from pd_serve.ids import Incarnation, WorkerId
from pd_serve.protocol.link import Role
from workers.front import _resolved
from workers.front_rank import RankProcess, _devices

SLEEPER = (
    sys.executable,
    "-c",
    "import time; time.sleep(60)",
)
IDENTITY = (WorkerId("w"), Incarnation(1), Role.BOTH)


def config_of(tp: int, **engine: Any) -> Config:
    return Config.model_validate({"engine": {"tp": tp, **engine}, "worker": {"id": "w"}})


@pytest.mark.parametrize(
    ("tp", "device", "visible", "names"),
    [
        (1, "auto", "3,5", [None]),
        (2, "auto", "3,5,7", ["3", "5"]),
        (2, "cuda", None, ["0", "1"]),
        (2, "cpu", "3", [None, None]),
        (2, "auto", "", [None, None]),
    ],
)
def test_each_rank_sees_one_device_of_those_the_worker_may_use(tp: int, device: str, visible: str | None, names: list[str | None]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [added.get("CUDA_VISIBLE_DEVICES") for added in _devices(config_of(tp, device=device), env)] == names


def test_more_ranks_than_devices_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 1"):
        _devices(config_of(2, device="auto"), {"CUDA_VISIBLE_DEVICES": "0"})


def test_a_workers_id_cannot_be_taken_for_a_rank() -> None:
    with pytest.raises(ConfigError, match="#"):
        _resolved(Config.model_validate({"worker": {"id": "w#1"}}), Role.BOTH, 8100)


def test_cores_are_shared_by_the_ranks_where_no_number_of_threads_is_set() -> None:
    assert _resolved(config_of(2, cpu_affinity="0"), Role.BOTH, 8100).engine.threads == 1
    assert _resolved(config_of(2, threads=5), Role.BOTH, 8100).engine.threads == 5


async def test_the_end_of_another_rank_is_told_and_ends_them_all() -> None:
    ranks = RankProcess(SLEEPER)
    await ranks.start(IDENTITY, config_of(3, device="cpu"), dict(os.environ))
    assert len(set(ranks.pids)) == 3
    assert ranks.pid == ranks.pids[0]
    os.kill(ranks.pids[2], signal.SIGKILL)
    assert await ranks.wait() == "rank 2: killed by SIGKILL"
    for process in ranks._processes:
        assert await process.wait() == -signal.SIGKILL
    ranks.close()


async def test_the_end_of_rank_0_is_the_workers() -> None:
    ranks = RankProcess((sys.executable, "-c", "import json, sys; sys.exit(7 if json.load(open(sys.argv[1]))['rank'] == 0 else 0)"))
    await ranks.start(IDENTITY, config_of(2, device="cpu"), dict(os.environ))
    assert await ranks.wait() == "exit code 7"
    ranks.close()
