"""The two processes of `bench transfer`, as transfer.py sees them: a command, a reply, a deadline. Owns what it starts."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import TypeVar

import msgspec

from pd_serve.bench.errors import BenchError
from pd_serve.bench.transfer_node import Command, Join, Joined, Open, Opened, Problem, Reply

R = TypeVar("R", bound=Reply)

REPLY_S = 90.0


class NodeProcess:
    """`with NodeProcess(Open(...)) as node`: started and opened, ended with the block."""

    def __init__(self, opening: Open) -> None:
        self.name = opening.name
        self._opening = opening
        self._child: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._replies = msgspec.json.Decoder(Reply)
        self.opened = Opened(b"", "")

    def __enter__(self) -> NodeProcess:
        env = {"OMP_NUM_THREADS": "1", "UCX_LOG_LEVEL": "error", **os.environ}
        command = [sys.executable, "-m", "pd_serve.bench.transfer_node"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        try:
            self.opened = self.call(self._opening, Opened)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def call(self, command: Command, kind: type[R]) -> R:
        """Raises BenchError: a problem over there, its end, or no reply in time."""
        self.send(command)
        return self.receive(kind)

    def send(self, command: Command) -> None:
        assert self._child is not None, "not started"
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(msgspec.json.encode(command) + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"the {self.name} has ended") from None

    def receive(self, kind: type[R]) -> R:
        assert self._child is not None, "not started"
        assert self._child.stdout is not None
        deadline = time.monotonic() + REPLY_S
        while b"\n" not in self._pending:
            if not select.select([self._child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BenchError(f"the {self.name} did not answer within {REPLY_S:g} s")
            data = os.read(self._child.stdout.fileno(), 1 << 20)
            if not data:
                raise BenchError(f"the {self.name} has ended with {self._child.wait()}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        reply = self._replies.decode(line)
        if isinstance(reply, Problem):
            raise BenchError(f"{self.name}: {reply.detail}")
        assert isinstance(reply, kind), f"{type(reply).__name__} instead of {kind.__name__}"
        return reply

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def join(first: NodeProcess, second: NodeProcess) -> Joined:
    """Each waits for the other. What the first was told."""
    for node, other in ((first, second), (second, first)):
        node.send(Join(other.name, other.opened.metadata))
    joined = first.receive(Joined)
    second.receive(Joined)
    return joined
