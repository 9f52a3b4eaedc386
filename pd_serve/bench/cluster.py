"""A local cluster as one arm of a measurement: `pd-serve up` as a child process, its addresses, pids and effective settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx
import msgspec
import psutil
from pydantic import ValidationError

from pd_serve.bench.errors import BenchError
from pd_serve.bench.results import Config, Scalar
from pd_serve.child_process import die_with_parent
from pd_serve.protocol.control import STATUS_PATH, RouterStatus

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
_PLACES = frozenset({"worker.port", "worker.routers", "router.port", "launch.run_dir"})
"""Settings that say where a process is, not how it works: chosen anew for each run."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. `settings` as for --set, such as `prefill.engine.cpu_affinity`."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    model: str = "demo"
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.colocated


class Process(msgspec.Struct, frozen=True):
    """As `pd-serve up --json` tells of it."""

    name: str
    role: str
    pid: int
    address: str
    log: str


class _Announcement(msgspec.Struct, frozen=True):
    url: str
    model: str
    run_dir: str
    processes: list[Process]


class LocalCluster:
    """`with LocalCluster(spec) as cluster:` is ready, workers joined; leaving stops it. Entering raises BenchError.

    The kernel ends it should this process die.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.url = ""
        self.processes: tuple[Process, ...] = ()
        self.config: Config = {}
        """Effective settings by process name, without secrets, ports and folders."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def run_dir(self) -> Path:
        assert self._folder is not None, "used before its start"
        return Path(self._folder.name)

    @property
    def pid(self) -> int:
        """Of the launcher, the parent of all others."""
        return self._child.pid if self._child is not None else 0

    def process(self, role: str, index: int = 0) -> Process:
        """Raises BenchError when there are not so many of that role."""
        found = [process for process in self.processes if process.role == role]
        if index >= len(found):
            raise BenchError(f"this cluster has {len(found)} {role} processes")
        return found[index]

    def start(self) -> None:
        """Blocks until everything is ready and every pair has joined. Raises BenchError."""
        self._folder = tempfile.TemporaryDirectory(prefix="pd-serve-bench-")
        deadline = time.monotonic() + START_TIMEOUT_S
        told = self.run_dir / "up.json"
        with told.open("wb") as out, (self.run_dir / "up.err").open("wb") as err:
            self._child = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(os.environ, OMP_WAIT_POLICY="PASSIVE"),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        while not told.stat().st_size:
            self._check(deadline, "is ready")
        announcement = msgspec.json.decode(told.read_bytes(), type=_Announcement)
        self.url = announcement.url
        self.processes = tuple(announcement.processes)
        self.config = {process.name: _read_settings(self.run_dir / f"{process.name}.toml") for process in self.processes}
        while not self._is_joined():
            self._check(deadline, "has joined")

    def stop(self) -> None:
        """As one Ctrl-C; what has not ended in time is killed. Idempotent."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            family = psutil.Process(child.pid).children(recursive=True)
            child.send_signal(signal.SIGINT)
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            _, alive = psutil.wait_procs(family, timeout=5)
            for process in alive:
                process.kill()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _command(self) -> list[str]:
        spec = self.spec
        command = [
            sys.executable,
            "-m",
            "pd_serve.cli",
            "up",
            "--json",
            "--port",
            "0",
            "--model",
            spec.model,
            "--log-dir",
            str(self.run_dir),
        ]
        command += ["--prefill", str(spec.prefill), "--decode", str(spec.decode), "--colocated", str(spec.colocated)]
        for key, value in spec.settings.items():
            command += ["--set", f"{key}={value}"]
        return command

    def _check(self, deadline: float, what: str) -> None:
        """One look's pause; the child's end is noticed at once. Raises BenchError."""
        assert self._child is not None
        try:
            code = self._child.wait(0.1)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise BenchError(f"not everything {what} within {START_TIMEOUT_S:g} s: {self._last_line()}") from None
            return
        raise BenchError(f"pd-serve up exited with {code}: {self._last_line()}")

    def _last_line(self) -> str:
        lines = (self.run_dir / "up.err").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def _is_joined(self) -> bool:
        try:
            reply = httpx.get(f"{self.url}{STATUS_PATH}", timeout=5, trust_env=False)
            workers = RouterStatus.model_validate_json(reply.content).workers
        except (httpx.HTTPError, ValidationError):
            return False
        ready = [worker for worker in workers if worker.ready]
        joined = [sum(peer.joined for peer in worker.peers) for worker in ready if worker.role.value == "prefill"]
        return len(ready) == self.spec.num_workers and all(count >= self.spec.decode for count in joined)


def _read_settings(path: Path) -> dict[str, Scalar]:
    settings: dict[str, Scalar] = {}
    for section, values in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if section != "security" and key not in _PLACES:
                settings[key] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return settings
