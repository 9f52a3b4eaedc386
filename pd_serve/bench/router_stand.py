"""What a measurement of the router needs to be running: mock workers, our router before them, other routers beside it. For bench/router.py.

client --> direct: the mock's own HTTP
       --> router: pd-serve router, over links to the mock
       --> peers:  any other program that forwards to the mock's HTTP; its command names {port} and {upstream}
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from pd_serve.bench.errors import BenchError
from pd_serve.child_process import die_with_parent

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
ROUTER, DIRECT = "router", "direct"
VOCAB_SIZE = 1 << 18
"""Of the mock: at least that of any tokenizer the router may have."""


@dataclass(frozen=True, slots=True)
class StandSpec:
    """What to start."""

    model: str = "demo"
    """Whose tokenizer the router uses; no weights are loaded."""
    processes: int = 1
    num_workers: int = 1
    interval_s: float = 0.0
    """Between two tokens of a request; 0: at once."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Command by name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the router, as for --set."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to the mock workers."""

    name: str
    port: int
    pid: int
    """Of the process whose CPU time counts, its children with it."""
    model: str

    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self._family())

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]


class Stand:
    """`with Stand(spec) as stand`: everything answers; leaving stops it. Entering raises BenchError."""

    def __init__(self, spec: StandSpec) -> None:
        self._spec = spec
        self._stack = ExitStack()
        self._folder = Path()
        self.arms: dict[str, Arm] = {}

    def __enter__(self) -> Stand:
        with self._stack:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pd-serve-bench-")))
            self._start_all()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _start_all(self) -> None:
        spec = self._spec
        command = [sys.executable, "-m", "pd_serve.bench.mock_worker", "--workers", str(spec.num_workers)]
        mock = self._start("mock", [*command, "--vocab-size", str(VOCAB_SIZE), "--interval-ms", str(spec.interval_s * 1e3)])
        ports = _announced_ports(mock, self._folder / "mock.log")
        upstream = f"http://127.0.0.1:{ports[0]}"
        self.arms[DIRECT] = Arm(DIRECT, ports[0], mock.pid, spec.model)
        router_port, *peer_ports = _free_ports(1 + len(spec.peers))
        settings = {
            "router.port": str(router_port),
            "router.workers": json.dumps([f"http://127.0.0.1:{port}" for port in ports]),
            "model.name": "bench",
            "engine.max_batch_tokens": "1000000",
            "engine.max_running": "100000",
            "router.max_open_requests": "100000",
            "router.max_queued_requests": "100000",
            "router.max_connections": "100000",
            **({"router.processes": str(spec.processes)} if spec.processes != 1 else {}),
            **spec.settings,
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        process = self._start(ROUTER, [sys.executable, "-m", "pd_serve.cli", "router", "--model", spec.model, *sets])
        self.arms[ROUTER] = Arm(ROUTER, router_port, process.pid, "bench")
        for (name, command_line), port in zip(spec.peers.items(), peer_ports, strict=True):
            words = shlex.split(command_line.format(port=port, upstream=upstream))
            self.arms[name] = Arm(name, port, self._start(name, words).pid, "bench")
        for name in (ROUTER, *spec.peers):
            self._await_answer(self.arms[name])

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if name == "mock" else log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                )
            except OSError as error:
                raise BenchError(f"cannot start {name}: {error}") from error
        self._stack.callback(_stop, process)
        return process

    def _await_answer(self, arm: Arm) -> None:
        """Until a request is answered through it."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        body = {"model": arm.model, "prompt": "Hello", "max_tokens": 1}
        while True:
            try:
                response = httpx.post(f"http://127.0.0.1:{arm.port}/v1/completions", json=body, timeout=5.0, trust_env=False)
                if response.status_code == httpx.codes.OK:
                    return
                said = f"{response.status_code} {response.text[:200]}"
            except httpx.HTTPError as error:
                said = str(error) or type(error).__name__
            if time.monotonic() > deadline or not psutil.pid_exists(arm.pid):
                log = (self._folder / f"{arm.name}.log").read_text(errors="replace")[-800:]
                raise BenchError(f"{arm.name} does not serve: {said}; the end of its log: {log}")
            time.sleep(0.1)  # until a process that has no other word of readiness has one


def _announced_ports(mock: subprocess.Popen[bytes], log: Path) -> list[int]:
    assert mock.stdout is not None
    line = mock.stdout.readline()
    if not line:
        raise BenchError(f"the mock worker did not start: {log.read_text(errors='replace')[-800:]}")
    ports: list[int] = json.loads(line)["ports"]
    return ports


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
