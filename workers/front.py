"""The front of a worker: one asyncio process between the routers and the rank. No torch and no UCX, so it answers whatever the engine does.

    start     listen, start the rank, register at every router (not ready) -> RankReady -> ready, links get their Welcome
    serve     links carry frames both ways; reports feed health, status and metrics
    drain     SIGTERM, SIGINT or /control/drain: refuse new work, wait until the rank holds nothing or the deadline passes -> Stop, exit 0
    hard stop a second signal: the rank is killed, exit 128 + signal
    rank dead links close, one line says why, exit 1: whoever supervises this process starts it again

The rank never outlives this process (front_rank.py). Started by `pd-serve prefill | decode | colocated`, which calls `serve_worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from typing import Any

import uvicorn
import uvloop

from pd_serve.addresses import advertised_host, bound_socket, http_address, require_secret_beyond_loopback
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.config_sources import settings_lines
from pd_serve.cores import parse_cores, thread_env, usable_cores
from pd_serve.errors import ConfigError, ProtocolError, UnavailableError
from pd_serve.ids import LinkId, RouterId, WorkerId, new_incarnation
from pd_serve.observe import setup_logging
from pd_serve.protocol.link import (
    Drain,
    Fatal,
    FromRouter,
    GetTrace,
    LinkDown,
    LinkUp,
    RankFrame,
    RankReady,
    Report,
    Role,
    RouterFrame,
    SetRole,
    Stop,
    ToRouter,
)
from pd_serve.protocol.server import ServerLimits, server_config
from pd_serve.protocol.traces import Traces
from pd_serve.tls import client_tls, server_tls
from pd_serve.wire import MAX_FRAME_NBYTES
from workers.front_app import build_app
from workers.front_links import Link, Links
from workers.front_metrics import FrontMetrics
from workers.front_rank import RANK_COMMAND, RankProcess
from workers.front_registration import Registrar, RegistrarSettings
from workers.front_view import FrontView, Identity
from workers.rank_group import RANK_MARK

_log = logging.getLogger("workers.front")
STOP_GRACE_S = 5.0
"""Seconds in which the rank must end after Stop."""
LOADING_STOP_GRACE_S = 1.0
LAST_FRAMES_S = 1.0
"""Seconds in which the last frames of a rank that has ended are read."""
TRACES_TIMEOUT_S = 5.0
_DATE_HEADER_S = 1.0
"""Seconds between two renewals of the Date header."""
LISTEN_BACKLOG = 256
LIMITS = ServerLimits(max_connections=256, max_header_nbytes=16 * 1024, read_timeout_s=10.0, stall_timeout_s=10.0)
"""Only routers, operators and probes come here: few, near and with little to say."""


def serve_worker(config: Config, role: Role, rank_command: tuple[str, ...] = RANK_COMMAND) -> int:
    """Run a worker in the foreground until it is stopped; returns the exit code. Raises ConfigError before anything is started."""
    require_secret_beyond_loopback(config.worker.host, config.security.cluster_secret)
    server_tls(config.security)
    with bound_socket(config.worker.host, config.worker.port) as listener:
        listener.listen(LISTEN_BACKLOG)
        config = _resolved(config, role, listener.getsockname()[1])
        setup_logging(config.observe.log_level, config.observe.log_format, config.worker.id, _secrets(config))
        for line in settings_lines(config):
            _log.info("settings %s", line)
        front = Front(config, role, RankProcess(rank_command))
        return uvloop.run(front.run(listener))


class Front:
    """Everything of one worker but its rank. Implements FrontControl for the routes."""

    def __init__(self, config: Config, role: Role, rank: RankProcess) -> None:
        self._config = config
        self._rank = rank
        worker = config.worker
        address = http_address(worker.advertise, worker.port, bool(config.security.tls_cert))
        identity = Identity(WorkerId(worker.id), new_incarnation(), role, address, os.getpid())
        self.view = FrontView(identity, worker.report_interval_s, MonotonicClock())
        self._links = Links()
        self._metrics = FrontMetrics()
        call = RegistrarSettings(config.security.cluster_secret, worker.heartbeat_s, client_tls(config.security))
        self._registrars = tuple(Registrar(url, call, self.view.registration, self._links.has_router) for url in worker.routers)
        self._ready = asyncio.Event()
        self._reported = asyncio.Event()
        self._drain_asked = asyncio.Event()
        self._drain_deadline_s = worker.drain_deadline_s
        self._hard_stop: asyncio.Future[int]
        self._traces: asyncio.Future[Traces] | None = None
        self._fatal = ""
        self._num_signals = 0

    async def run(self, listener: socket.socket) -> int:
        """Until the end of the rank, a drain or a hard stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        self._hard_stop = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)
        server = _Server(_uvicorn_config(self))
        serving = asyncio.create_task(server.serve([listener]), name="http")
        helpers: list[asyncio.Task[None]] = []
        try:
            view = self.view
            identity = (view.identity.worker_id, view.identity.incarnation, view.identity.role)
            await self._rank.start(identity, self._config, _rank_env(self._config))
            view.rank_pid = self._rank.pid
            _log.info(
                "%s %s listens at %s, rank process %d",
                view.identity.role.value,
                view.identity.worker_id,
                view.identity.address,
                view.rank_pid,
            )
            helpers = [asyncio.create_task(registrar.run(), name="registration") for registrar in self._registrars]
            return await self._live(serving)
        finally:
            self._links.close_all("the worker is stopping")
            self._rank.close()
            await _cancel(*helpers)
            server.stop()
            await serving

    async def _live(self, serving: asyncio.Task[None]) -> int:
        rank_end = asyncio.create_task(self._follow_rank(), name="rank")
        drain = asyncio.create_task(self._drain_asked.wait(), name="drain")
        try:
            ends: set[asyncio.Future[Any]] = {rank_end, drain, serving, self._hard_stop}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if drain.done() and not rank_end.done() and not self._hard_stop.done():
                stopping = asyncio.create_task(self._stop_rank(rank_end), name="stop")
                await asyncio.wait({stopping, self._hard_stop}, return_when=asyncio.FIRST_COMPLETED)
                if not self._hard_stop.done():
                    return stopping.result()
                await _cancel(stopping)
            if self._hard_stop.done():
                _log.warning("second signal: the rank is killed, nothing is waited for")
                return 128 + self._hard_stop.result()
            if rank_end.done():
                _log.error(
                    "worker %s: the rank process %d %s; exiting", self.view.identity.worker_id, self.view.rank_pid, rank_end.result()
                )
            else:
                _log.error("the HTTP server ended by itself; exiting")
            return 1
        finally:
            await _cancel(rank_end, drain)

    async def _follow_rank(self) -> str:
        """Handle every frame until the rank's end; how it ended, in words."""
        reading = asyncio.create_task(self._read_frames(), name="frames")
        ended = asyncio.create_task(self._rank.wait(), name="rank process")
        try:
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading, ended}, timeout=LAST_FRAMES_S if ended.done() else STOP_GRACE_S)
            if not ended.done():
                self._fatal = self._fatal or "closed its socket and did not end"
                self._rank.kill()
            how = await ended or "exit code 0"
        finally:
            await _cancel(reading, ended)
        return f"ended ({how}){': ' + self._fatal if self._fatal else ''}"

    async def _read_frames(self) -> None:
        try:
            async for frame in self._rank.frames():
                self._on_frame(frame)
        except ProtocolError as error:
            self._fatal = f"sent a bad frame: {error}"
            self._rank.kill()

    def _on_frame(self, frame: RankFrame) -> None:
        match frame:
            case ToRouter(link_id, inner):
                self._links.deliver(link_id, inner)
            case Report():
                changed = self.view.take_report(frame)
                self._metrics.take(frame, len(self._links))
                self._reported.set()
                if changed:
                    self._tell_routers()
            case RankReady(welcome):
                self.view.take_welcome(welcome)
                self._ready.set()
                self._tell_routers()
                _log.info("ready: model %s, %d KV blocks", welcome.model_name, welcome.info.layout.num_blocks)
            case Traces():
                if self._traces is not None and not self._traces.done():
                    self._traces.set_result(frame)
            case Fatal(message):
                self._fatal = message

    async def _stop_rank(self, rank_end: asyncio.Task[str]) -> int:
        """Drain, Stop, and wait for the end; the exit code."""
        view = self.view
        view.draining = True
        self._tell_routers()
        grace_s = LOADING_STOP_GRACE_S
        if self._ready.is_set():
            grace_s = STOP_GRACE_S
            _log.info("draining for at most %g s", self._drain_deadline_s)
            self._rank.send(Drain(self._drain_deadline_s))
            drained = asyncio.create_task(self._until_drained())
            await asyncio.wait({drained, rank_end}, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(drained)
            if rank_end.done():
                _log.error("the rank process %d %s while draining", view.rank_pid, rank_end.result())
                return 1
        self._rank.send(Stop())
        await asyncio.wait({rank_end}, timeout=grace_s)
        if not rank_end.done():
            if self._ready.is_set():
                _log.warning("the rank did not end within %g s of Stop: killed", grace_s)
            self._rank.kill()
            await asyncio.wait({rank_end})
        _log.info("stopped; %d leases, %d running, %d waiting", view.load.leases, view.load.running, view.load.waiting)
        return 0

    async def _until_drained(self) -> None:
        """Until the rank holds nothing, is frozen, or a little after the deadline (at which the rank itself fails what is left)."""
        loop = asyncio.get_running_loop()
        patience_s = self._config.worker.report_interval_s
        give_up_at = loop.time() + self._drain_deadline_s + 4 * patience_s
        while not self.view.drained:
            if self.view.unhealthy or loop.time() > give_up_at:
                _log.warning("drain ends early: %s", self.view.unhealthy or "the deadline has passed and the rank still holds work")
                return
            self._reported.clear()
            try:
                await asyncio.wait_for(self._reported.wait(), patience_s)
            except TimeoutError:
                continue

    # ---- FrontControl

    async def open_link(self, router_id: RouterId) -> Link:
        await self._ready.wait()
        assert self.view.welcome is not None
        link = self._links.open(router_id)
        self._links.deliver(link.link_id, self.view.welcome)
        self._rank.send(LinkUp(link.link_id, router_id))
        _log.info("router %s linked (%d)", router_id, link.link_id)
        return link

    async def forward(self, link_id: LinkId, frame: RouterFrame) -> None:
        self._rank.send(FromRouter(link_id, frame))
        await self._rank.drain()

    def close_link(self, link: Link, reason: str) -> None:
        self._links.remove(link, reason)
        self._rank.send(LinkDown(link.link_id))
        self._tell_routers()
        _log.info("link %d of router %s ended: %s", link.link_id, link.router_id, link.closed)

    def drain(self, deadline_s: float) -> None:
        self._drain_deadline_s = deadline_s
        self.view.draining = True
        self._drain_asked.set()

    def set_role(self, role: Role, deadline_s: float) -> None:
        _log.info("role %s -> %s; what runs in the old one has %g s", self.view.load.role.value, role.value, deadline_s)
        self._rank.send(SetRole(role, deadline_s))

    async def traces(self, limit: int) -> Traces:
        if self.view.not_ready:
            raise UnavailableError(self.view.not_ready)
        if self._traces is None or self._traces.done():
            self._traces = asyncio.get_running_loop().create_future()
            self._rank.send(GetTrace(limit))
        try:
            return await asyncio.wait_for(asyncio.shield(self._traces), TRACES_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError("the rank did not answer") from None

    def render_metrics(self) -> bytes:
        return self._metrics.render()

    # ----

    def _tell_routers(self) -> None:
        for registrar in self._registrars:
            registrar.hasten()

    def _on_signal(self, signum: int) -> None:
        self._num_signals += 1
        self._drain_asked.set()
        if self._num_signals > 1 and not self._hard_stop.done():
            self._hard_stop.set_result(signum)


class _Server(uvicorn.Server):
    """Leaves the signals to the front, and sleeps longer than uvicorn's tenth of a second between two looks at the clock."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop_asked = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stop_asked.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_asked.wait(), _DATE_HEADER_S)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def _uvicorn_config(front: Front) -> uvicorn.Config:
    security = front._config.security
    return server_config(
        build_app(front, security.cluster_secret),
        LIMITS,
        server_tls(security),
        ws="websockets-sansio",
        ws_max_size=MAX_FRAME_NBYTES,
        ws_per_message_deflate=False,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Returns once they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _resolved(config: Config, role: Role, port: int) -> Config:
    """The settings with every "0: automatic" and "empty: automatic" of the worker's own filled in. Raises ConfigError."""
    worker, engine = config.worker, config.engine
    advertise = advertised_host(worker.host, worker.advertise, worker.routers)
    worker_id = worker.id or f"{socket.gethostname()}-{role.value}-{port}"
    if RANK_MARK in worker_id:
        raise ConfigError(f"worker.id {worker_id!r}: {RANK_MARK} stands between a worker and its rank")
    threads = engine.threads or max(1, (len(parse_cores(engine.cpu_affinity)) or usable_cores()) // engine.tp)
    return config.model_copy(
        update={
            "worker": worker.model_copy(update={"id": worker_id, "port": port, "advertise": advertise}),
            "engine": engine.model_copy(update={"threads": threads}),
        }
    )


def _rank_env(config: Config) -> dict[str, str]:
    return {**os.environ, **thread_env(config.engine.threads)}


def _secrets(config: Config) -> tuple[str, ...]:
    return (config.security.cluster_secret, *config.security.client_keys)
