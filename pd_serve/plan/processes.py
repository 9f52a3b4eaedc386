"""Curves in several processes at once, each with a simulator of its own; what it is asked and answers are lines of JSON.

Owner: whoever enters `with CurveProcesses(...)`; when it is left, no process is. A process that fails ends the search with its last words.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import IO

import msgspec

from pd_serve.plan.curve import Curve
from pd_serve.plan.errors import PlanError
from pd_serve.plan.scenario import Scenario
from pd_serve.plan.search import CurveTask

PROGRAM = (sys.executable, "-m", "pd_serve.plan.curve_process")


class CurveProcesses:
    """run(tasks) gives their curves in the order of the tasks, whichever process is done first."""

    def __init__(self, scenario: Scenario, count: int, on_done: Callable[[Curve], None], program: Sequence[str] = PROGRAM) -> None:
        """`on_done` is called in threads, as curves come in."""
        self._hello = msgspec.json.encode(scenario) + b"\n"
        self._count = count
        self._on_done = on_done
        self._program = program
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self) -> CurveProcesses:
        for _ in range(self._count):
            process = subprocess.Popen(self._program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._processes.append(process)
            self._idle.put(process)
            _pipe(process.stdin).write(self._hello)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                _close(_pipe(pipe))

    def run(self, tasks: Sequence[CurveTask]) -> Iterator[Curve]:
        """Raises PlanError when a process fails."""
        return self._threads.map(self._ask, tasks)

    def _ask(self, task: CurveTask) -> Curve:
        process = self._idle.get()
        try:
            stdin = _pipe(process.stdin)
            stdin.write(msgspec.json.encode(task) + b"\n")
            stdin.flush()
            line = _pipe(process.stdout).readline()
        except BrokenPipeError:
            line = b""
        finally:
            self._idle.put(process)
        if not line:
            raise _failed(process)
        curve = msgspec.json.decode(line, type=Curve)
        self._on_done(curve)
        return curve


def _failed(process: subprocess.Popen[bytes]) -> PlanError:
    words = _pipe(process.stderr).read().decode(errors="replace").strip().splitlines()
    return PlanError(f"a process of the search ended with {process.wait()}: {words[-1] if words else 'it said nothing'}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "all three are pipes"
    return pipe


def _close(pipe: IO[bytes]) -> None:
    """What was not written is for nobody any more."""
    try:
        pipe.close()
    except BrokenPipeError:
        return
