"""The rank processes of a worker as its front sees them: started here, rank 0 spoken to over a Unix socket, and never left behind.

Owned by the front's event loop. Each rank gets a session of its own, so that a Ctrl-C reaches the front alone and stopping keeps its order.
The kernel kills it when the front dies (child_process.py), whatever the rank is doing then. The other ranks speak to rank 0 over socket
pairs that are made here; the end of any rank is the end of all. The folder with the socket and the settings goes with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

from pd_serve.child_process import die_with_parent
from pd_serve.config import Config
from pd_serve.cores import parse_cores
from pd_serve.errors import ConfigError
from pd_serve.ids import Incarnation, WorkerId
from pd_serve.length_prefix import payloads, prefixed
from pd_serve.protocol.link import FrontFrame, RankFrame, Role, front_codec, rank_codec
from workers.rank_spec import RankSpec

RANK_COMMAND = (sys.executable, "-m", "workers.rank")
LAST_WORDS_S = 2.0
"""Seconds in which a rank may still say what it knows of another's end, or goodbye."""


class RankProcess:
    """All ranks of one worker: start -> frames / send -> kill, or the end of a process -> wait -> close. One connection, made by rank 0."""

    def __init__(self, command: tuple[str, ...] = RANK_COMMAND) -> None:
        self._command = command
        self._folder: Path | None = None
        self._processes: list[asyncio.subprocess.Process] = []
        self._server: asyncio.Server | None = None
        self._connection: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._encode = front_codec().encode
        self._decode = rank_codec().decode

    @property
    def pid(self) -> int:
        """Of rank 0; 0 before the start."""
        return self._processes[0].pid if self._processes else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(process.pid for process in self._processes)

    @property
    def connected(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    async def start(self, identity: tuple[WorkerId, Incarnation, Role], config: Config, env: Mapping[str, str]) -> None:
        """Listen, write the settings, start the processes. Raises ConfigError for fewer devices than ranks."""
        worker_id, incarnation, role = identity
        num_ranks = config.engine.tp
        devices = _devices(config, env)
        folder = self._folder = Path(tempfile.mkdtemp(prefix="pd-serve-"))
        socket_path = folder / "rank.sock"
        self._connection = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, socket_path, limit=1 << 20)
        pairs = [socket.socketpair() for _ in range(1, num_ranks)]
        spec = RankSpec(
            worker_id=worker_id,
            incarnation=incarnation,
            role=role,
            socket_path=str(socket_path),
            config=config,
            rendezvous=f"file://{folder}/group" if num_ranks > 1 else "",
        )
        try:
            for rank in range(num_ranks):
                ends = [near for near, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                descriptors = tuple(end.fileno() for end in ends)
                path = folder / f"rank{rank or ''}.json"
                spec.model_copy(update={"rank": rank, "group_fds": descriptors}).write(path)
                await self._start_rank(path, {**env, **devices[rank]}, descriptors, parse_cores(config.engine.cpu_affinity))
        finally:
            for end in (end for pair in pairs for end in pair):
                end.close()

    async def _start_rank(self, spec_path: Path, env: Mapping[str, str], descriptors: tuple[int, ...], cores: frozenset[int]) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(spec_path),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=partial(_prepare_child, os.getpid(), cores),
        )
        self._processes.append(process)

    async def frames(self) -> AsyncIterator[RankFrame]:
        """Everything the rank sends, until it closes the socket. Raises ProtocolError on bytes that are no frame."""
        assert self._connection is not None
        reader, self._writer = await self._connection
        async for payload in payloads(reader, "the rank"):
            yield self._decode(payload)

    def send(self, frame: FrontFrame) -> None:
        """Queue a frame; lost without a word when the rank is not connected (its end is reported by `wait`)."""
        if self._writer is None or self._writer.is_closing():
            return
        self._writer.write(prefixed(self._encode(frame)))

    async def drain(self) -> None:
        """Wait until the rank keeps up: what stops a router that sends faster than the rank reads."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except ConnectionError:
                return

    async def wait(self) -> str:
        """The worker's processes have ended, or are about to; how, in words. Empty for exit 0."""
        assert self._processes
        ends = [asyncio.create_task(self._end_of(rank)) for rank in range(len(self._processes))]
        try:
            while not ends[0].done():
                waiting = [end for end in ends if not end.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failed = next((end.result() for end in ends[1:] if end.done() and end.result()), "")
                if failed and not ends[0].done():
                    await asyncio.wait({ends[0]}, timeout=LAST_WORDS_S)
                    self.kill()
                    return failed
            if ends[1:]:
                # The others were told to stop when rank 0 was: their transports say goodbye too.
                await asyncio.wait(ends[1:], timeout=LAST_WORDS_S)
            return ends[0].result()
        finally:
            for end in ends:
                end.cancel()

    async def _end_of(self, rank: int) -> str:
        code = await self._processes[rank].wait()
        if code == 0:
            return ""
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"rank {rank}: {how}" if rank else how

    def kill(self) -> None:
        """SIGKILL to the ranks and whatever they started. Idempotent."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs and remove the folder. Idempotent."""
        self.kill()
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._connection is not None
        if self._connection.done():
            writer.close()
            return
        self._connection.set_result((reader, writer))


def _devices(config: Config, env: Mapping[str, str]) -> list[dict[str, str]]:
    """What is added to each rank's environment: of the GPUs that the worker may use, each rank sees one. Raises ConfigError."""
    num_ranks = config.engine.tp
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if num_ranks == 1 or config.engine.device == "cpu" or visible == "":
        return [{} for _ in range(num_ranks)]
    names = [str(rank) for rank in range(num_ranks)] if visible is None else [name.strip() for name in visible.split(",")]
    if len(names) < num_ranks:
        raise ConfigError(f"engine.tp {num_ranks} needs as many devices, CUDA_VISIBLE_DEVICES={visible} has {len(names)}")
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:num_ranks]]


def _prepare_child(parent_pid: int, cores: frozenset[int]) -> None:
    """In the child, before exec."""
    die_with_parent(parent_pid, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)
