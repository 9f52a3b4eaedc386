"""A real cluster of processes for end-to-end, accuracy and fault tests: started by `pd-serve up`, stopped and proved clean at the end."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from pd_serve.child_process import die_with_parent
from pd_serve.config import SecurityConfig
from pd_serve.tls import client_tls
from tests.patience import PATIENCE_S, Waiting
from tests.pids import send
from tests.ports import free_port, free_ports

START_TIMEOUT_S = 120.0
CLEAN_TIMEOUT_S = 5.0


def wait_until(condition: Any, timeout_s: float, what: str, interval_s: float = 0.05) -> Any:
    """The first true value of the condition. AssertionError after that many seconds of waiting (tests/patience.py)."""
    waiting = Waiting(timeout_s, interval_s)
    while True:
        value = condition()
        if value:
            return value
        if waiting.is_over():
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(interval_s)


@dataclass
class Cluster:
    """Router and workers of one `pd-serve up`, on free loopback ports."""

    log_dir: Path
    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    dtype: str = "float32"
    model: str = "demo"
    device: str = "cpu"
    settings: dict[str, str] = field(default_factory=dict)
    restart: bool = False
    port: int = field(default_factory=free_port)

    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.settings.get('security.tls_cert') else 'http'}://127.0.0.1:{self.port}"

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """For clients. Made once: reading the system's authorities takes a while."""
        return client_tls(SecurityConfig(tls_ca=self.settings.get("security.tls_ca", "")))

    @property
    def secret_header(self) -> dict[str, str]:
        """What control routes ask for."""
        secret = self.settings.get("security.cluster_secret")
        return {"Authorization": f"Bearer {secret}"} if secret else {}

    @property
    def log(self) -> str:
        return "\n".join(f"==> {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in sorted(self.log_dir.rglob("*.log")))

    def start(self) -> Cluster:
        command = [sys.executable, "-m", "pd_serve.cli", "up", "--json", "--port", str(self.port), "--model", self.model]
        command += ["--prefill", str(self.prefill), "--decode", str(self.decode), "--colocated", str(self.colocated)]
        command += ["--dtype", self.dtype, "--device", self.device, "--log-dir", str(self.log_dir)]
        if self.restart:
            command.append("--restart")
        # Most tests start a cluster for a few requests: those may well be the first.
        for key, value in ({"engine.warm_up_s": "0"} | self._ports() | self.settings).items():
            command += ["--set", f"{key}={value}"]
        env = dict(os.environ, OMP_WAIT_POLICY="PASSIVE")
        with (self.log_dir / "up.log").open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        try:
            wait_until(self._ready, START_TIMEOUT_S, f"the cluster is ready\n{self.log}")
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    def _ports(self) -> dict[str, str]:
        """Settings that give every worker a port which nobody takes before it listens."""
        counts = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {f"{role}.worker.port": str(free_ports(count)[0]) for role, count in counts.items() if count}

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"pd-serve up exited with {self.process.returncode}\n{self.log}")
        try:
            if httpx.get(f"{self.url}/ready", timeout=2, verify=self.tls).status_code != 200:
                return False
            workers = self.workers()
        except httpx.HTTPError:
            return False
        expected = self.prefill + self.decode + self.colocated
        if len(workers) != expected or not all(worker["ready"] for worker in workers):
            return False
        num_decode = sum(worker["role"] == "decode" for worker in workers)
        joined = [sum(peer["joined"] for peer in worker["peers"]) for worker in workers if worker["role"] == "prefill"]
        return all(count >= num_decode for count in joined)

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.status()["workers"]
        return workers

    def status(self) -> dict[str, Any]:
        reply = httpx.get(f"{self.url}/internal/v1/status", headers=self.secret_header, timeout=PATIENCE_S, verify=self.tls)
        reply.raise_for_status()
        status: dict[str, Any] = reply.json()
        return status

    def worker(self, role: str, index: int = 0) -> dict[str, Any]:
        return [worker for worker in sorted(self.workers(), key=lambda worker: worker["id"]) if worker["role"] == role][index]

    def kill_worker(self, role: str, index: int = 0) -> dict[str, Any]:
        """SIGKILL to every process of a worker: rank first, then front."""
        worker = self.worker(role, index)
        send((*worker["rank_pids"], worker["pid"]), signal.SIGKILL)
        return worker

    def metric(self, address: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry the given labels, read from a process's /metrics."""
        total = 0.0
        for line in httpx.get(f"{address}/metrics", timeout=PATIENCE_S, verify=self.tls).text.splitlines():
            head, _, value = line.rpartition(" ")
            sample, _, label_text = head.partition("{")
            if sample == name and all(f'{key}="{wanted}"' in label_text for key, wanted in labels.items()):
                total += float(value)
        return total

    def settled_metric(self, address: str, name: str, **labels: str) -> float:
        """The metric, once it stands still."""
        told: list[float] = []

        def has_settled() -> bool:
            told.append(self.metric(address, name, **labels))
            return len(told) > 2 and told[-1] == told[-2] == told[-3]

        wait_until(has_settled, PATIENCE_S, f"{name} stands still", 0.1)
        return told[-1]

    def assert_counts(self, address: str, name: str, expected: float, **labels: str) -> None:
        """The metric comes to be just that. A worker tells of what it has counted when it becomes idle, which is after its last answer."""
        wait_until(lambda: self.metric(address, name, **labels) >= expected, CLEAN_TIMEOUT_S, f"{name} is {expected}")
        assert self.metric(address, name, **labels) == expected

    def num_held(self) -> int:
        """Requests, sequences, leases and blocks that are held for any request, on all workers and in the router; not the prefix cache."""
        status = self.status()
        held = int(status["open_requests"] + status["queued_requests"])
        for worker in status["workers"]:
            blocks = worker["blocks"]
            held += blocks["total"] - blocks["free"] - blocks["cached"]
            held += blocks["leased"] + blocks["quarantined"] + worker["leases"] + worker["running"] + worker["waiting"]
        return held

    def assert_clean(self, timeout_s: float = CLEAN_TIMEOUT_S) -> None:
        """Nothing is held for any request on any worker or in the router: only the prefix cache keeps blocks."""

        try:
            wait_until(lambda: self.num_held() == 0, timeout_s, "every table is empty")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.status(), indent=1)}\n{self.log}") from None

    def stop(self) -> None:
        """One Ctrl-C: everything ends cleanly, no process is left."""
        assert self.process is not None
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"pd-serve up did not stop within {PATIENCE_S} s\n{self.log}") from None
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive, f"left running: {alive}\n{self.log}"
        assert code == 0, f"pd-serve up exited with {code}\n{self.log}"

    def kill(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            send([child.pid for child in psutil.Process(self.process.pid).children(recursive=True)], signal.SIGKILL)
            self.process.kill()
        self.process.wait()


@contextmanager
def running(log_dir: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster for the length of a block; clean and stopped by one Ctrl-C at its end, killed when the block fails."""
    log_dir.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(log_dir=log_dir, **options).start()
    try:
        yield cluster
        cluster.assert_clean()
        cluster.stop()
    finally:
        cluster.kill()
