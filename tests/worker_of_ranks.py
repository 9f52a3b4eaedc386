"""A worker's rank processes without a front: started as a front would, driven by the test."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pd_serve.config import Config
from pd_serve.cores import thread_env
from pd_serve.protocol.link import Role
from tests.rank_driver import RankDriver
from workers.rank_spec import RankSpec


class WorkerOfRanks:
    """Connected, not yet ready: driver.wait_ready()."""

    def __init__(self, folder: Path, name: str, num_ranks: int, timeout_s: float = 120.0, **sections: dict[str, Any]) -> None:
        values: dict[str, dict[str, Any]] = {
            "model": {"dtype": "float32"},
            "kv": {"num_blocks": 128},
            "engine": {"device": "cpu", "threads": 1, "max_batch_tokens": 64, "tp": num_ranks, "warm_up_s": 0.05},
            "worker": {"report_interval_s": 0.1},
            "observe": {"log_level": "warning"},
        }
        for section, changes in sections.items():
            values[section] = values.get(section, {}) | changes
        path = folder / f"{name}.sock"
        spec = RankSpec(
            worker_id=name,
            incarnation=secrets.randbits(62),
            role=Role.BOTH,
            socket_path=str(path),
            config=Config.model_validate(values),
            rendezvous=f"file://{folder}/{name}.group",
        )
        pairs = [socket.socketpair() for _ in range(1, num_ranks)]
        self.processes: list[subprocess.Popen[bytes]] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(timeout_s)
            for rank in range(num_ranks):
                ends = [near for near, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                own = spec.model_copy(update={"rank": rank, "group_fds": tuple(end.fileno() for end in ends)})
                own.write(folder / f"{name}{rank}.json")
                command = [sys.executable, "-m", "workers.rank", str(folder / f"{name}{rank}.json")]
                self.processes.append(subprocess.Popen(command, env={**os.environ, **thread_env(1)}, pass_fds=own.group_fds))
            for end in (end for pair in pairs for end in pair):
                end.close()
            self.connection, _ = listener.accept()
        self.driver = RankDriver(self.connection, timeout_s)

    def close(self) -> None:
        """Kill what still runs."""
        self.connection.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
