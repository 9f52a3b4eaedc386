"""The rank process as its front sees it: started here, spoken to over a Unix socket, and never left behind.

Owned by the front's event loop. The rank gets a session of its own, so that a Ctrl-C reaches the front alone and stopping keeps its order.
The kernel kills it when the front dies (child_process.py), whatever the rank is doing then. The folder with the socket and the settings
goes with `close`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

from pd_serve.child_process import die_with_parent
from pd_serve.config import Config
from pd_serve.cores import parse_cores
from pd_serve.errors import ProtocolError
from pd_serve.ids import Incarnation, WorkerId
from pd_serve.protocol.link import FrontFrame, RankFrame, Role, front_codec, rank_codec
from pd_serve.wire import MAX_FRAME_NBYTES
from workers.rank_spec import RankSpec

RANK_COMMAND = (sys.executable, "-m", "workers.rank")
_LENGTH = struct.Struct("<I")


class RankProcess:
    """start -> frames / send -> kill, or the end of the process -> wait -> close. One connection, made by the rank."""

    def __init__(self, command: tuple[str, ...] = RANK_COMMAND) -> None:
        self._command = command
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._server: asyncio.Server | None = None
        self._connection: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._encode = front_codec().encode
        self._decode = rank_codec().decode

    @property
    def pid(self) -> int:
        """0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def connected(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    async def start(self, identity: tuple[WorkerId, Incarnation, Role], config: Config, env: Mapping[str, str]) -> None:
        """Listen, write the settings, start the process."""
        worker_id, incarnation, role = identity
        folder = self._folder = Path(tempfile.mkdtemp(prefix="pd-serve-"))
        socket_path = folder / "rank.sock"
        self._connection = asyncio.get_running_loop().create_future()
        self._server = await asyncio.start_unix_server(self._accept, socket_path, limit=1 << 20)
        spec = RankSpec(worker_id=worker_id, incarnation=incarnation, role=role, socket_path=str(socket_path), config=config)
        spec.write(folder / "rank.json")
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            str(folder / "rank.json"),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_prepare_child, os.getpid(), parse_cores(config.engine.cpu_affinity)),
        )

    async def frames(self) -> AsyncIterator[RankFrame]:
        """Everything the rank sends, until it closes the socket. Raises ProtocolError on bytes that are no frame."""
        assert self._connection is not None
        reader, self._writer = await self._connection
        try:
            while True:
                (nbytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if nbytes > MAX_FRAME_NBYTES:
                    raise ProtocolError(f"the rank announced a frame of {nbytes} bytes")
                yield self._decode(await reader.readexactly(nbytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def send(self, frame: FrontFrame) -> None:
        """Queue a frame; lost without a word when the rank is not connected (its end is reported by `wait`)."""
        if self._writer is None or self._writer.is_closing():
            return
        payload = self._encode(frame)
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def drain(self) -> None:
        """Wait until the rank keeps up: what stops a router that sends faster than the rank reads."""
        if self._writer is not None:
            try:
                await self._writer.drain()
            except ConnectionError:
                return

    async def wait(self) -> str:
        """The process has ended; how, in words. Empty for exit 0."""
        assert self._process is not None
        code = await self._process.wait()
        if code == 0:
            return ""
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """SIGKILL to the rank and whatever it started. Idempotent."""
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

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


def _prepare_child(parent_pid: int, cores: frozenset[int]) -> None:
    """In the child, before exec."""
    die_with_parent(parent_pid, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)
