"""The router process: builds the app, runs it under uvicorn, ends it in good order. Named by the cli as a string."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import Route

from pd_serve.addresses import bound_socket, http_address, require_secret_beyond_loopback
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config, RouterConfig
from pd_serve.errors import ModelError, NoWorkerError, OverloadedError, PdServeError
from pd_serve.ids import RouterId
from pd_serve.model_store import resolve_model
from pd_serve.observe import Metrics, Side, setup_logging
from pd_serve.protocol.client import LinkSettings
from pd_serve.protocol.control import RegisterWorker
from pd_serve.protocol.server import ServerLimits, server_config
from pd_serve.protocol.siblings import SiblingStream, Topic
from pd_serve.tls import client_tls, server_tls
from router.admission import Admission
from router.api import internal, models, ops, overview, responses, tokens
from router.api.admin import router as admin_router
from router.api.chat import chat_endpoint
from router.api.completions import completions_endpoint
from router.api.errors import on_bug, on_error, on_http_exception, on_invalid
from router.api.openapi import openapi_route
from router.api.responses import responses_endpoint
from router.api.ui import ui_routes
from router.app import RouterApp, StraightEndpoint
from router.assignment import Assigner
from router.cors import Cors
from router.dispatcher import Dispatcher, DispatcherSettings
from router.fleet_start import fleet_control
from router.grammars import GrammarChecks
from router.lifecycle import LifecycleSettings
from router.observing import check_observing, start_observing
from router.occupancy import Occupancy, SharedOccupancy
from router.overload import check_overload, overload_settings
from router.policy.registry import new_chooser
from router.pool import PoolSettings, WorkerPool
from router.process_spec import ProcessSpec
from router.services import Services
from router.siblings import Place, Siblings
from router.stand_in_tokenizer import StandInTokenizer
from router.supervisor import Supervisor
from router.tenants import Tenants, num_cells
from router.throughput import Throughput
from router.tokenizer import TOKENIZER_NAME, FolderTokenizer, TextCodec
from router.tools.registry import OutputFormats
from router.warm_up import warm_up

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the idle time after which common clients and balancers close: they must be the first to do so."""
BACKLOG = 2048
ACCEPTS_AT_ONCE = 32
"""The event loop accepts one connection per turn from each listening socket, so there are duplicates of it: under load, the last of some
hundred clients that come together would wait for that many turns.
"""
GC_THRESHOLD = 10_000
"""Objects made and kept before the collector looks for cycles among them: thousands of open requests are no garbage."""


def create_app(config: Config, codec: TextCodec | None = None, max_model_len: int = 0, place: Place | None = None) -> FastAPI:
    """The ASGI app of one router process. `codec` None: the tokenizer of the configured model, which is fetched or converted if need be.

    Raises ModelError.
    """
    if codec is None:
        folder = resolve_model(config.model.id, config.model.cache_dir)
        codec = new_codec(config, folder)
        warm_up(codec)
        max_model_len = max_model_len or trained_max_len(folder)
    if config.model.max_len:
        max_model_len = min(config.model.max_len, max_model_len or config.model.max_len)
    check_observing(config.observe)
    check_overload(config)
    text = codec

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        here = place or Place()
        siblings = None if here.to_supervisor is None else Siblings(await SiblingStream.over(here.to_supervisor))
        services = _new_services(config, text, max_model_len, here.occupancy)
        app.state.services = services
        tracing = start_observing(services)
        services.siblings = siblings
        controlled = ExitStack()
        fleet = controlled.enter_context(fleet_control(services, here.index))
        services.pool.start(config.router.workers)
        listening = None
        if siblings is not None:
            listening = asyncio.create_task(siblings.run(_answers(services), partial(_register, services), fleet.changed))
        try:
            yield
        finally:
            if siblings is not None and listening is not None:
                listening.cancel()
                siblings.close()
            services.is_draining = True
            controlled.close()
            services.dispatcher.close(NoWorkerError("the router is shutting down"))
            if tracing is not None:
                await tracing.close()
            await services.pool.close()

    straight: dict[str, StraightEndpoint] = {
        "/v1/chat/completions": chat_endpoint(),
        "/v1/completions": completions_endpoint(),
        "/v1/responses": responses_endpoint(),
    }
    app = RouterApp(straight, title="pd-serve", lifespan=lifespan, openapi_url=None)
    app.router.routes[:] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in straight.items()]
    for module in (models, responses, tokens, ops, internal, overview):
        app.include_router(module.router)
    app.include_router(admin_router)
    app.router.routes += ui_routes()
    app.router.routes.append(openapi_route(app.routes, config.router, config.security))
    app.add_exception_handler(PdServeError, on_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_bug)
    return app


def serve_router(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; running requests then have `worker.drain_deadline_s` to end. Blocks; the process's exit code.

    Raises ConfigError before listening beyond loopback without a cluster secret, and ModelError.
    """
    require_secret_beyond_loopback(config.router.host, config.security.cluster_secret)
    _setup_logging(config, "router")
    is_shared = config.router.processes > 1
    with bound_socket(config.router.host, config.router.port, is_shared) as listener:
        if not is_shared:
            return _serve(create_app(config), config, listener)
        folder = resolve_model(config.model.id, config.model.cache_dir)  # once, before several would
        model = config.model.model_copy(update={"id": str(folder), "name": model_name_of(config)})
        router = config.router.model_copy(update={"port": listener.getsockname()[1]})
        with asyncio.Runner() as runner:
            return runner.run(Supervisor(config.model_copy(update={"model": model, "router": router})).run())


def serve_process(spec: ProcessSpec) -> int:
    """One process of a router of several; blocks. Raises ConfigError and ModelError."""
    config = spec.config
    _setup_logging(config, f"router-{spec.index}")
    occupancy = SharedOccupancy(spec.block_fd, spec.index, spec.num_processes, num_cells(config))
    place = Place(occupancy, socket.socket(fileno=spec.sibling_fd), spec.index)
    with bound_socket(config.router.host, config.router.port, is_shared=True) as listener:
        return _serve(create_app(config, place=place), config, listener)


def _serve(app: FastAPI, config: Config, listener: socket.socket) -> int:
    gc.collect()
    gc.freeze()  # all that the libraries made lives on: the collector need not look at it again
    gc.set_threshold(GC_THRESHOLD)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Server(app, config, listener).run())


def _setup_logging(config: Config, process: str) -> None:
    secret_values = (config.security.cluster_secret, *config.security.client_keys)
    setup_logging(config.observe.log_level, config.observe.log_format, process, secret_values)


class _Server:
    """uvicorn under our own signals: the exit code is 0 when a signal ended it in good order."""

    def __init__(self, app: FastAPI, config: Config, listener: socket.socket) -> None:
        self._app = app
        self._listener = listener
        self._drain_deadline_s = config.worker.drain_deadline_s
        tls = server_tls(config.security)
        self._address = http_address(config.router.host, listener.getsockname()[1], tls is not None)
        self._server = _QuietServer(
            server_config(
                app,
                limits_of_server(config.router),
                tls,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(config.worker.drain_deadline_s) + 1,
                backlog=BACKLOG,
            ),
            self._listening,
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stop)
        logger.info("listening at %s", self._address)
        await self._server.serve(accepting_together(self._listener))
        return 0 if self._server.started else 1

    def _listening(self) -> None:
        services: Services = self._app.state.services
        if services.siblings is not None:
            services.siblings.listening()

    def _stop(self) -> None:
        """The second signal does not wait for running requests."""
        if self._server.should_exit:
            self._server.force_exit = True
        self._server.should_exit = True
        services: Services | None = getattr(self._app.state, "services", None)
        if services is not None and not services.is_draining:
            services.is_draining = True
            error = NoWorkerError("the router is shutting down")
            asyncio.get_running_loop().call_later(self._drain_deadline_s, services.dispatcher.close, error)


class _QuietServer(uvicorn.Server):
    """Leaves the process's signals alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def accepting_together(listener: socket.socket) -> list[socket.socket]:
    """The socket and its duplicates."""
    return [listener, *(listener.dup() for _ in range(ACCEPTS_AT_ONCE - 1))]


def limits_of_server(router: RouterConfig) -> ServerLimits:
    return ServerLimits(router.max_connections, router.max_header_bytes, router.request_read_timeout_s, router.client_stall_timeout_s)


def new_codec(config: Config, folder: Path) -> TextCodec:
    """The folder's tokenizer; where weights are random and there is none, one that stands in. Raises ModelError."""
    if config.model.load_format == "random" and not (folder / TOKENIZER_NAME).is_file():
        return StandInTokenizer.of_folder(folder)
    return FolderTokenizer(folder)


def model_name_of(config: Config) -> str:
    """What clients call the model."""
    return config.model.name or config.model.id.rstrip("/").rsplit("/", 1)[-1]


def trained_max_len(folder: Path) -> int:
    """max_position_embeddings of the folder's config.json; 0 where there is none."""
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings", 0)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"cannot read {folder / 'config.json'}: {error}") from error
    return value if isinstance(value, int) else 0


def _answers(services: Services) -> dict[Topic, Callable[[], bytes]]:
    """To what other processes of this router ask."""
    return {
        Topic.METRICS: lambda: ops.own_metrics(services).encode(),
        Topic.READY: lambda: services.why_not_ready().encode(),
        Topic.REQUESTS: lambda: services.dispatcher.timeline.recent().model_dump_json().encode(),
    }


def _register(services: Services, worker: RegisterWorker) -> None:
    """It registered at another process, which has told it what there was to tell."""
    with suppress(OverloadedError):
        services.pool.register(worker)


def _new_services(config: Config, codec: TextCodec, max_model_len: int, occupancy: Occupancy) -> Services:
    """Within the event loop: the dispatcher and the pool live on it."""
    router = config.router
    router_id = RouterId(f"router-{secrets.token_hex(6)}")
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    tls = client_tls(config.security)
    speeds, clock = Throughput(), MonotonicClock()
    chooser = new_chooser(config, lambda: speeds.handover_s)
    pool = WorkerPool(
        PoolSettings(
            link=LinkSettings(router_id, config.security.cluster_secret, tls=tls),
            worker_timeout_s=router.worker_timeout_s,
            join_grace_s=config.transport.join_timeout_s,
            text_vocab_size=codec.vocab_size,
            breaker=config.breaker,
            reads_cached=chooser.reads_cached,
        ),
        metrics,
    )
    settings = DispatcherSettings(
        lifecycle=LifecycleSettings(router.transfer_timeout_s, router.handover_timeout_s, router.max_moves),
        routing=chooser.settings,
        queue_timeout_s=router.queue_timeout_s,
        request_timeout_s=router.request_timeout_s,
        max_queued=router.max_queued_requests,
        share_prefix=config.kv.prefix_cache,
        overload=overload_settings(config),
    )
    return Services(
        config=config,
        router_id=router_id,
        model_name=model_name_of(config),
        max_model_len=max_model_len,
        codec=codec,
        formats=OutputFormats(config.model, codec),
        metrics=metrics,
        admission=Admission(router.max_open_requests, Tenants(config, occupancy), metrics, occupancy),
        pool=pool,
        dispatcher=Dispatcher(pool, Assigner(pool, chooser, speeds, clock.now), settings, metrics, clock, occupancy),
        occupancy=occupancy,
        grammars=GrammarChecks(config.structured, has_vocabulary=not isinstance(codec, StandInTokenizer)),
        worker_tls=tls,
        cors=Cors(router.cors_origins) if router.cors_origins else None,
    )
