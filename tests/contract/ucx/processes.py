"""The test's side of agents: real processes, each with one ucx transport."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
SECRET = "the cluster's secret"
POOL_NBYTES = 4 << 20
PeerName = list[Any]


class Process:
    """One agent. Every call has a deadline; a dead agent is an EOFError."""

    def __init__(self, env: dict[str, str] | None = None, agent: str = "agent") -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", f"tests.contract.ucx.{agent}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "UCX_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self._pending = b""
        self.peer: PeerName = []
        self.metadata = ""
        self.address = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, op: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        assert self._child.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self._child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"agent {self.peer} (pid {self.pid}) did not answer in {timeout_s} s")
            data = os.read(self._child.stdout.fileno(), 1 << 20)
            if not data:
                raise self._died()
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)["answer"]

    def _died(self) -> EOFError:
        return EOFError(f"agent {self.peer} died: {self._child.wait()}")

    def call(self, op: str, timeout_s: float = PATIENCE_S, **arguments: Any) -> Any:
        self.send(op, **arguments)
        return self.receive(timeout_s)

    def open(self, name: str, incarnation: int, lanes: str, secret: str = SECRET, **options: Any) -> Process:
        self.peer = [name, incarnation]
        opened = self.call("open", peer=self.peer, secret=secret, lanes=lanes, nbytes=options.pop("nbytes", POOL_NBYTES), **options)
        self.metadata, self.address = opened["metadata"], opened["address"]
        return self

    def add(self, other: Process) -> None:
        self.call("add", peer=other.peer, metadata=other.metadata)

    def wait(self, kind: str, timeout_s: float = PATIENCE_S / 2) -> Any:
        """The next event of that kind as a dict. Fails when none comes in time."""
        event = self.call("wait", timeout_s=timeout_s + PATIENCE_S / 2, kind=kind, timeout=timeout_s)
        assert event is not None, f"no {kind} at {self.peer} within {timeout_s} s; events {self.call('events')}"
        return event

    def write(self, other: Process, rows: list[tuple[int, int, int]], lease: int = 1, epoch: int = 1) -> None:
        self.call("write", peer=other.peer, rows=rows, lease=lease, epoch=epoch)

    def flush(self, other: Process, token: int = 1) -> Any:
        self.call("flush", peer=other.peer, token=token)
        flushed = self.wait("Flushed")
        assert flushed["token"] == token
        return flushed

    def wait_streaming(self, other: Process) -> None:
        """Until a round of its stream has been flushed; the other takes its steps meanwhile."""
        for _ in range(int(PATIENCE_S / 0.1)):
            other.call("run", seconds=0.05)
            self.call("run", seconds=0.05)
            if self.call("stream_state")["ok"]:
                return
        raise AssertionError(f"nothing that {self.peer} has streamed arrived")

    def allow(self, writer: Process, lease: int = 1, epoch: int = 1, end: int = POOL_NBYTES) -> None:
        self.call("window", writer=writer.peer, start=0, end=end, lease=lease, epoch=epoch)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._child.kill()

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None


@dataclass
class Cluster:
    """Agents of one test on one lane, ended with it."""

    lanes: str
    processes: list[Process] = field(default_factory=list)
    agent: str = "agent"
    """Module that its processes run."""

    @property
    def one_sided(self) -> bool:
        return self.lanes == "shm" or self.agent == "emulated_puts"

    def start(self, name: str, incarnation: int = 1, env: dict[str, str] | None = None, **options: Any) -> Process:
        process = Process(env, self.agent)
        self.processes.append(process)
        return process.open(name, incarnation, options.pop("lanes", self.lanes), **options)

    def pair(self) -> tuple[Process, Process]:
        """A writer and a target that have joined; the writer's pool holds a pattern, the target's zeros, one window over all of it."""
        writer, target = self.start("writer"), self.start("target")
        self.join(writer, target)
        writer.call("pattern", seed=1)
        target.allow(writer)
        return writer, target

    def join(self, first: Process, second: Process) -> None:
        first.add(second)
        second.add(first)
        for process in (first, second):
            joined = process.wait("PeerJoined")
            assert joined["one_sided"] is self.one_sided

    def end(self) -> None:
        for process in self.processes:
            process.end()
