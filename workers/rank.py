"""The rank process: one model on one device. `python -m workers.rank SETTINGS.json` (rank_spec.py), started by its front.

    read the settings, connect to the front
    -> the model's folder and geometry -> the transport (its thread; the KV pool) -> the weights (engine thread) -> RankReady
    -> control loop until Stop (exit 0); anything else that ends it is one line to the front (Fatal) and exit 1

Main thread: control (control_loop.py). It lets nothing but the front end it: Ctrl-C in a terminal is the front's to interpret.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_serve.addresses import is_wildcard
from pd_serve.clock import MonotonicClock
from pd_serve.config import Config
from pd_serve.cores import parse_cores, thread_env
from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.errors import ConfigError, PdServeError
from pd_serve.ids import new_epoch
from pd_serve.model_store import resolve_model
from pd_serve.observe import setup_logging
from pd_serve.protocol.link import Fatal, PeerInfo, RankReady, Welcome
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.registry import transport_factory
from pd_serve.wire import PROTOCOL_VERSION
from workers.control_loop import LAST_WORDS_S, ControlLoop, RankMessage, RankParts
from workers.engine_thread import EngineThread, LayerHook
from workers.front_socket import FrontSocket
from workers.host_identity import host_id
from workers.inbox import Inbox
from workers.machine import WorkerMachine
from workers.prefill.staging import check_staging
from workers.rank_group import RankGroup
from workers.rank_spec import RankSpec
from workers.settings import MachineSettings, pool_limited_len
from workers.transport_commands import AllocatePool, RegisterPool, TransportReady, UsePacker
from workers.transport_thread import TransportThread

if TYPE_CHECKING:
    from pd_serve.engine.loader import EnginePlan
    from pd_serve.engine.runner import ModelRunner

_log = logging.getLogger("workers.rank")

TRANSPORT_START_S = 60.0
"""Mapping and zeroing a large pool takes a while."""
STOP_S = 2.0
"""Seconds for the running step and what is outstanding at Stop; the front waits longer than twice this."""


def main(arguments: list[str]) -> int:
    """The exit code. Everything that goes wrong is told in one line, to the front where it can be reached, else to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(arguments) != 1:
        print("usage: python -m workers.rank SETTINGS.json", file=sys.stderr)
        return 2
    try:
        spec = RankSpec.read(Path(arguments[0]))
        front = FrontSocket.connect(spec.socket_path)
    except (ConfigError, OSError) as error:
        print(f"rank: {error}", file=sys.stderr)
        return 1
    observe = spec.config.observe
    setup_logging(observe.log_level, observe.log_format, f"{spec.worker_id}/rank", _secrets(spec.config))
    try:
        return Rank(spec, front).run()
    except PdServeError as error:
        message = str(error)
        _log.error("%s", message)
    except Exception as error:  # noqa: BLE001 - process root: told to the front, then the process ends
        message = f"internal error: {type(error).__name__}: {error}"
        _log.exception("the rank failed")
    front.send(Fatal(message))
    front.flush_for(LAST_WORDS_S)
    return 1


class Rank:
    """Everything of one rank, in order of its making. run() once."""

    def __init__(self, spec: RankSpec, front: FrontSocket) -> None:
        self._spec = spec
        self._config = spec.config
        self._clock = MonotonicClock()
        self._inbox: Inbox[RankMessage] = Inbox()
        self._front = front
        self._engine = EngineThread(self._inbox.put, self._clock)

    def run(self) -> int:
        """The exit code. Raises PdServeError where the rank cannot start."""
        config = self._config
        _settle_threads(config)
        started_at = self._clock.now()
        folder = resolve_model(config.model.id, config.model.cache_dir, _log_progress)
        plan = _plan(folder, config)
        transport = TransportThread(
            transport_factory(config.transport.name),
            self._transport_settings(),
            self._inbox.put,
            num_traces=config.observe.trace_requests,
            verify=config.transport.verify,
        )
        self._engine.start()
        ready, runner = self._open(plan, transport)
        _log.info(
            "model %s with %d KV blocks of %d tokens on %s, transport %s with lanes %s, in %.1f s",
            folder.name,
            plan.layout.num_blocks,
            plan.layout.block_size,
            plan.device,
            config.transport.name,
            ", ".join(ready.lanes),
            self._clock.now() - started_at,
        )
        welcome = self._welcome(plan, ready)
        machine = self._machine(plan, welcome)
        events = runner.layer_events
        transport.submit(self._packer(plan, runner))
        self._engine.serve(runner, LayerHook(transport.submit, None if events is None else events.wait))
        group = RankGroup(welcome.info.num_ranks, welcome.info.num_model_kv_heads)
        parts = RankParts(self._front, self._inbox, self._engine, transport, group)
        loop = ControlLoop(machine, parts, config.worker.report_interval_s, self._clock)
        # What lives from here on until the end would only be looked through again by every collection.
        gc.collect()
        gc.freeze()
        self._front.send(RankReady(welcome))
        code = loop.run()
        if not self._engine.stop(STOP_S) or not transport.stop(STOP_S):
            _log.warning("a thread did not end within %g s", STOP_S)
        return code

    def _open(self, plan: EnginePlan, transport: TransportThread) -> tuple[TransportReady, ModelRunner[Any]]:
        """The pool and the weights. On a CPU the pool is memory that the transport allocates, on a GPU the engine's."""
        from pd_serve.engine.loader import load_runner

        nbytes = plan.layout.pool_nbytes + self._config.transport.staging_bytes
        if plan.device.type == "cpu":
            ready = transport.start(AllocatePool(nbytes), TRANSPORT_START_S)
            runner = self._engine.call(partial(_load, plan, self._config.engine.threads, ready.region.buffer)).result()
            return ready, runner
        runner = self._engine.call(partial(load_runner, plan, None, self._clock, self._config.transport.staging_bytes)).result()
        ready = transport.start(RegisterPool(runner.cache.address, nbytes, f"cuda:{plan.device.index or 0}"), TRANSPORT_START_S)
        return ready, runner

    def _packer(self, plan: EnginePlan, runner: ModelRunner[Any]) -> UsePacker:
        from workers.prefill.packer import TorchPacker

        transport = self._config.transport
        check_staging(plan.layout, transport.staging_bytes, transport.staging_slot_bytes)
        packer = TorchPacker(runner.cache, runner.cache.region)
        return UsePacker(packer, plan.layout.pool_nbytes, transport.staging_bytes, transport.staging_slot_bytes)

    def _transport_settings(self) -> TransportSettings:
        worker, transport = self._config.worker, self._config.transport
        return TransportSettings(
            self_id=self._spec.peer,
            secret=self._config.security.cluster_secret.encode(),
            host=worker.advertise if is_wildcard(worker.host) and worker.advertise else worker.host,
            host_id=host_id(),
            lanes=transport.lanes,
            min_bandwidth=transport.min_bandwidth,
            join_timeout_s=transport.join_timeout_s,
            probe_nbytes=transport.probe_bytes,
            binding=transport.binding,
        )

    def _welcome(self, plan: EnginePlan, ready: TransportReady) -> Welcome:
        model = self._config.model
        return Welcome(
            info=PeerInfo(
                peer=self._spec.peer,
                role=self._spec.role,
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint=plan.info.fingerprint,
                layout=plan.layout,
                transport=self._config.transport.name,
                transport_metadata=(ready.metadata,),
                total_kv_heads=plan.info.kv_shape.num_heads,
            ),
            model_name=model.name or model.id.rstrip("/").rpartition("/")[2],
            max_model_len=pool_limited_len(plan.layout, plan.max_len),
            vocab_size=plan.info.vocab_size,
            eos_token_ids=plan.info.eos_token_ids,
            pid=os.getppid(),
            rank_pids=(os.getpid(),),
        )

    def _machine(self, plan: EnginePlan, welcome: Welcome) -> WorkerMachine:
        config = self._config
        settings = MachineSettings(
            info=welcome.info,
            vocab_size=welcome.vocab_size,
            max_model_len=welcome.max_model_len,
            max_waiting=config.engine.max_waiting,
            headroom_tokens=config.kv.headroom_tokens,
            quarantine_retry_s=config.worker.quarantine_retry_s,
            quarantine_fence_share=config.kv.quarantine_fence_share,
            hard_fence_after_s=config.transport.hard_fence_after_s,
            rejoin_after_s=config.worker.heartbeat_s,
            load_interval_s=config.worker.load_interval_s,
            heartbeat_s=config.worker.report_interval_s,
            max_packing_nbytes=config.transport.staging_slot_bytes,
        )
        scheduler = SchedulerSettings(
            max_batch_tokens=config.engine.max_batch_tokens,
            max_running=config.engine.max_running,
            prefill_chunk=config.engine.prefill_chunk,
            eos_token_ids=frozenset(plan.info.eos_token_ids),
            max_model_len=welcome.max_model_len,
        )
        return WorkerMachine(settings, scheduler, new_epoch, config.kv.prefix_cache)


def _settle_threads(config: Config) -> None:
    """Cores and OpenMP, as the front has set them already; for a rank started otherwise. Precondition: torch is not imported yet."""
    cores = parse_cores(config.engine.cpu_affinity)
    if cores:
        os.sched_setaffinity(0, cores)
    if config.engine.threads:
        for name, value in thread_env(config.engine.threads).items():
            os.environ.setdefault(name, value)


def _plan(folder: Path, config: Config) -> EnginePlan:
    from pd_serve.engine.loader import plan_engine

    return plan_engine(folder, config)


def _load(plan: EnginePlan, num_threads: int, buffer: memoryview | None) -> ModelRunner[Any]:
    """On the engine thread: the number of compute threads is a setting of the calling thread."""
    import torch

    from pd_serve.engine.loader import load_runner

    if num_threads:
        torch.set_num_threads(num_threads)
    return load_runner(plan, buffer, MonotonicClock())


def _log_progress(what: str, done: int, total: int) -> None:
    _log.info("%s%s", what, f" ({done}/{total})" if total else "")


def _secrets(config: Config) -> tuple[str, ...]:
    return (config.security.cluster_secret, *config.security.api_keys)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: a thread that is stuck in a library must not keep a process alive that has said it ends.
    os._exit(code)
