"""A router of several processes: starts them, starts again what dies, carries what they say to each other, ends them in good order.

    supervisor --- socket pair --- process 0 --- links to every worker
         |     +---- socket pair --- process 1 --- links to every worker
         +--- holds the port (SO_REUSEPORT) without listening; every process listens on it, and the kernel deals connections out

Each process is a router to the workers, with its own links. What must hold for all together is shared: how much is in progress
(occupancy.py), who the workers are (a registration reaches one process and is passed on), metrics and readiness (asked of all).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from pd_serve.child_process import die_with_parent
from pd_serve.config import Config
from pd_serve.errors import ProtocolError
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.siblings import (
    Answer,
    Answers,
    FleetChange,
    Listening,
    Question,
    SiblingFrame,
    SiblingStream,
    Topic,
    WorkerAdded,
    WorkerRegistered,
    WorkerRemoved,
)
from router.occupancy import SharedOccupancy, shared_block
from router.pool import FORGET_AFTER_S
from router.process_spec import ProcessSpec
from router.tenants import num_cells

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "router.process")
ANSWER_TIMEOUT_S = 2.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STOP_MARGIN_S = 5.0
"""Beyond the drain deadline."""


@dataclass(slots=True)
class _Process:
    index: int
    process: asyncio.subprocess.Process | None = None
    stream: SiblingStream | None = None
    has_listened: bool = False
    """Since it was started last."""


@dataclass(slots=True)
class _Asked:
    """A question on its way round."""

    asker: SiblingStream
    question_id: int
    waiting: set[int]
    data: list[bytes] = field(default_factory=list)


class Supervisor:
    """`await run()`: until a signal; the exit code. `config`: with the real port and the model as a folder."""

    def __init__(self, config: Config, command: tuple[str, ...] = COMMAND) -> None:
        self._config = config
        self._command = command
        self._processes = [_Process(index) for index in range(config.router.processes)]
        self._block = shared_block(len(self._processes), num_cells(config))
        self._occupancy = SharedOccupancy(self._block, 0, len(self._processes), num_cells(config))
        self._registered: dict[str, tuple[bytes, float]] = {}
        """Last registration of each worker, and when."""
        self._fleet_changes: dict[str, FleetChange] = {}
        """The last one at each address."""
        self._asked: dict[int, _Asked] = {}
        self._ids = itertools.count(1)
        self._stopping = asyncio.Event()
        self._failed = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        try:
            with tempfile.TemporaryDirectory(prefix="pd-serve-router-") as folder:
                keepers = [asyncio.create_task(self._keep(entry, Path(folder)), name=f"process {entry.index}") for entry in self._processes]
                codes = await asyncio.gather(*keepers)
        finally:
            for entry in self._processes:
                if entry.process is not None and entry.process.returncode is None:
                    entry.process.kill()
            os.close(self._block)
        return 0 if not any(codes) and not self._failed.is_set() else 1

    def _stop(self) -> None:
        """The second signal does not wait for running requests: each process takes a second one so."""
        self._stopping.set()
        for entry in self._processes:
            if entry.process is not None and entry.process.returncode is None:
                entry.process.terminate()

    # ---- processes

    async def _keep(self, entry: _Process, folder: Path) -> int:
        """One process, started again whenever it dies. Its last exit code. A task root of the supervisor."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            code = await self._one_life(entry, folder)
            if self._stopping.is_set():
                return code
            if not entry.has_listened and not any(other.has_listened for other in self._processes):
                logger.error("process %d ended with code %d before it could serve", entry.index, code)
                self._failed.set()
                self._stop()
                return code
            backoff_s = FIRST_BACKOFF_S if entry.has_listened else min(2 * backoff_s, LONGEST_BACKOFF_S)
            logger.error("process %d died (code %d); starting it again in %g s", entry.index, code, backoff_s)
            try:
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            except TimeoutError:
                continue
            return 0

    async def _one_life(self, entry: _Process, folder: Path) -> int:
        ours, theirs = socket.socketpair()
        path = folder / f"process{entry.index}.json"
        entry.has_listened = False
        with theirs:
            descriptors = (self._block, theirs.fileno())
            ProcessSpec(
                config=self._config,
                index=entry.index,
                num_processes=len(self._processes),
                block_fd=descriptors[0],
                sibling_fd=descriptors[1],
            ).write(path)
            entry.process = await asyncio.create_subprocess_exec(
                *self._command,
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=descriptors,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        if self._stopping.is_set():
            entry.process.terminate()
        entry.stream = await SiblingStream.over(ours)
        self._tell_workers(entry.stream)
        reader = asyncio.create_task(self._read(entry, entry.stream))
        killer = asyncio.create_task(self._kill_late(entry.process))
        try:
            return await entry.process.wait()
        finally:
            killer.cancel()
            reader.cancel()
            self._occupancy.clear(entry.index)
            entry.stream.close()
            entry.stream = None
            for question_id, asked in list(self._asked.items()):
                self._heard(question_id, asked, entry.index, None)

    async def _kill_late(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._config.worker.drain_deadline_s + STOP_MARGIN_S)
        if process.returncode is None:
            process.kill()

    def _tell_workers(self, stream: SiblingStream) -> None:
        """A process that starts later than its workers registered."""
        now = asyncio.get_running_loop().time()
        self._registered = {name: seen for name, seen in self._registered.items() if now - seen[1] < FORGET_AFTER_S}
        for change in self._fleet_changes.values():  # first: one that was removed and started anew has registered since
            stream.send(change)
        for registration, _ in self._registered.values():
            stream.send(WorkerRegistered(registration))

    # ---- what they say

    async def _read(self, entry: _Process, stream: SiblingStream) -> None:
        """Until the process ends. A task root: one that speaks nonsense is ended, and started again."""
        try:
            async for frame in stream.frames():
                self._said(entry, stream, frame)
        except (ProtocolError, ValidationError):
            logger.exception("process %d speaks nonsense", entry.index)
            if entry.process is not None and entry.process.returncode is None:
                entry.process.kill()

    def _said(self, entry: _Process, stream: SiblingStream, frame: SiblingFrame) -> None:
        match frame:
            case Listening():
                entry.has_listened = True
            case WorkerRegistered(registration):
                worker_id = RegisterWorker.model_validate_json(registration).worker_id
                self._registered[worker_id] = (registration, asyncio.get_running_loop().time())
                self._tell_others(entry, frame)
            case WorkerAdded() | WorkerRemoved():
                self._fleet_changes[frame.address] = frame
                self._tell_others(entry, frame)
            case Question(question_id, topic):
                self._pass_on(entry, _Asked(stream, question_id, set()), topic)
            case Answer(question_id, data):
                asked = self._asked.get(question_id)
                if asked is not None:
                    self._heard(question_id, asked, entry.index, data)
            case Answers():
                return  # ours alone to say

    def _tell_others(self, entry: _Process, frame: SiblingFrame) -> None:
        for other in self._processes:
            if other is not entry and other.stream is not None:
                other.stream.send(frame)

    def _pass_on(self, entry: _Process, asked: _Asked, topic: Topic) -> None:
        """To every other process that takes requests."""
        number = next(self._ids)
        self._asked[number] = asked
        for other in self._processes:
            if other is not entry and other.has_listened and other.stream is not None:
                asked.waiting.add(other.index)
                other.stream.send(Question(number, topic))
        if asked.waiting:
            asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, self._finish, number)
        else:
            self._finish(number)

    def _heard(self, number: int, asked: _Asked, index: int, data: bytes | None) -> None:
        """None: that process has ended."""
        if index in asked.waiting:
            asked.waiting.discard(index)
            if data is not None:
                asked.data.append(data)
            if not asked.waiting:
                self._finish(number)

    def _finish(self, number: int) -> None:
        """All have answered, or their time is up. Idempotent."""
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked.asker.send(Answers(asked.question_id, tuple(asked.data), len(asked.waiting)))
