"""A cluster whose processes are started one by one with their own commands, as an orchestrator does, so that each can be replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pd_serve.child_process import die_with_parent
from tests.cluster import START_TIMEOUT_S, Cluster, wait_until
from tests.faults.whole import is_whole
from tests.ports import free_port

STOP_TIMEOUT_S = 45.0


@dataclass
class SeparateCluster(Cluster):
    """Names of processes: `router`, `prefill-0`, `decode-1` and so on; a name keeps its port."""

    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    env: dict[str, dict[str, str]] = field(default_factory=dict)
    """By name: variables of that process alone, at every start."""

    @property
    def worker_names(self) -> list[str]:
        return [f"{role}-{index}" for role, number in (("prefill", self.prefill), ("decode", self.decode)) for index in range(number)]

    def start(self) -> SeparateCluster:
        for name in ("router", *self.worker_names):
            self.start_process(name)
        self.wait_whole()
        return self

    def start_process(self, name: str) -> None:
        """The log is appended to. From the main thread only: the process ends with the thread that started it."""
        role = name.partition("-")[0]
        port = self.port if name == "router" else self.ports.setdefault(name, free_port())
        command = [sys.executable, "-m", "pd_serve.cli", role, "--model", self.model, "--port", str(port)]
        settings = {"engine.warm_up_s": "0"} | self.settings
        if name != "router":
            command += ["--router", self.url, "--dtype", self.dtype, "--device", self.device]
            settings |= {"worker.id": name, "engine.threads": "1"}
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        with (self.log_dir / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **self.env.get(name, {})},
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )

    def wait_whole(self) -> None:
        wait_until(lambda: is_whole(self), START_TIMEOUT_S, f"all are ready and joined\n{self.log}")

    def named(self, name: str) -> dict[str, Any]:
        return next(worker for worker in self.workers() if worker["id"] == name)

    def ended(self) -> dict[str, int]:
        """Exit codes of the processes that do not run, by name."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait_exit(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> tuple[int, float]:
        """(exit code, seconds waited)"""
        began_at = time.monotonic()
        return self.processes[name].wait(timeout_s), time.monotonic() - began_at

    def last_words(self, name: str) -> str:
        """The end of its log."""
        return "\n".join((self.log_dir / f"{name}.log").read_text().splitlines()[-5:])

    def stop(self) -> None:
        """SIGTERM to all, the router first; each ends with exit code 0."""
        for name in ("router", *self.worker_names):
            self.processes[name].terminate()
        codes = {name: self.wait_exit(name)[0] for name in self.processes}
        assert set(codes.values()) == {0}, f"{codes}\n{self.log}"

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def running_separately(log_dir: Path, **options: Any) -> Iterator[SeparateCluster]:
    """For the length of a block; clean and stopped in good order at its end, killed when the block fails."""
    log_dir.mkdir(parents=True, exist_ok=True)
    cluster = SeparateCluster(log_dir=log_dir, **options)
    try:
        cluster.start()
        yield cluster
        cluster.assert_clean()
        cluster.stop()
    finally:
        cluster.kill()
