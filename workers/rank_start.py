"""What every rank of a worker does at its start, whether it leads (rank.py) or follows (rank_follower.py).

    the model's folder -> the other ranks (engine thread) -> the model's geometry -> the transport (its thread; the KV pool)
    -> this rank's weights (engine thread)

Called on the main thread. Precondition: torch is not imported yet.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_serve.addresses import is_wildcard
from pd_serve.clock import Clock, MonotonicClock
from pd_serve.config import Config
from pd_serve.cores import parse_cores, thread_env
from pd_serve.errors import ConfigError
from pd_serve.model_store import resolve_model
from pd_serve.transport.base import TransportSettings
from pd_serve.transport.registry import transport_factory
from workers.engine_thread import EngineFailed, EngineThread, LayerHook
from workers.events import StepDone, StepFailed
from workers.host_identity import host_id
from workers.rank_group import rank_peer
from workers.rank_spec import RankSpec
from workers.transport_commands import AllocatePool, RegisterPool, TransportOutput, TransportReady, UsePacker
from workers.transport_thread import TransportThread

if TYPE_CHECKING:
    from pd_serve.engine.loader import EnginePlan
    from pd_serve.engine.parallel import Collective
    from pd_serve.engine.runner import ModelRunner

_log = logging.getLogger(__name__)

RankMessage = TransportOutput | StepDone | StepFailed | EngineFailed
"""What a rank's threads tell its control thread."""

TRANSPORT_START_S = 60.0
"""Mapping and zeroing a large pool takes a while."""
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
GROUP_TIMEOUT_S = 120.0
"""Seconds in which the ranks of a worker must meet, and later add up each sum. One that ends is noticed by its socket, much sooner."""
STOP_S = 2.0
"""Seconds for the running step and what is outstanding at Stop; the front waits longer than twice this."""


@dataclass(frozen=True, slots=True)
class OpenRank:
    """Both threads are running, and the engine serves."""

    plan: EnginePlan
    ready: TransportReady
    engine: EngineThread
    transport: TransportThread

    def stop(self) -> None:
        if not self.engine.stop(STOP_S) or not self.transport.stop(STOP_S):
            _log.warning("a thread did not end within %g s", STOP_S)


def open_rank(spec: RankSpec, post: Callable[[RankMessage], None]) -> OpenRank:
    """`post` is called on the rank's threads. Raises PdServeError where the rank cannot start."""
    config, clock = spec.config, MonotonicClock()
    _settle_threads(config)
    started_at = clock.now()
    folder = resolve_model(config.model.id, config.model.cache_dir, _log_progress)
    engine = EngineThread(post, clock)
    engine.start()
    group = engine.call(partial(_open_group, spec)).result()
    plan = engine.call(partial(_plan, folder, config, group)).result()
    transport = TransportThread(
        transport_factory(config.transport.name),
        _transport_settings(spec),
        post,
        num_traces=config.observe.trace_requests,
        verify=plan.layout if config.transport.verify else None,
    )
    ready, runner = _open(plan, config, (engine, transport), group, clock)
    num_warm = engine.call(partial(_warm_up, runner, plan, config, group)).result()
    _log.info(
        "model %s with %d KV blocks of %d tokens on %s, transport %s with lanes %s, %d sizes of step computed once, in %.1f s",
        folder.name,
        plan.layout.num_blocks,
        plan.layout.block_size,
        plan.device,
        config.transport.name,
        ", ".join(ready.lanes),
        num_warm,
        clock.now() - started_at,
    )
    transport.submit(_packer(plan, config, runner))
    events = runner.layer_events
    prepare = None if runner.grammars is None else runner.grammars.prepare
    engine.serve(runner, LayerHook(transport.submit, None if events is None else events.wait), prepare)
    # What lives from here on until the end would only be looked through again by every collection.
    gc.collect()
    gc.freeze()
    return OpenRank(plan, ready, engine, transport)


def secrets_of(config: Config) -> tuple[str, ...]:
    """What no log may show."""
    return (config.security.cluster_secret, *config.security.client_keys)


def _open_group(spec: RankSpec) -> Collective:
    from pd_serve.engine.loader import choose_device
    from pd_serve.engine.parallel import open_group

    num_ranks = spec.config.engine.tp
    device = choose_device(spec.config.engine.device)
    if num_ranks > 1 and device.type == "cpu" and spec.config.engine.device == "auto" and _NVIDIA_DRIVER.exists():
        # Rank 0 may well have one: half a model on a GPU would wait for the other half for ever.
        raise ConfigError(f"rank {spec.rank} of {num_ranks} has no GPU of its own; set engine.device to cpu if none is meant")
    return open_group(spec.rank, num_ranks, spec.rendezvous, device, GROUP_TIMEOUT_S)


def _plan(folder: Path, config: Config, group: Collective) -> EnginePlan:
    from pd_serve.engine.loader import plan_engine

    return plan_engine(folder, config, group)


def _open(
    plan: EnginePlan, config: Config, threads: tuple[EngineThread, TransportThread], group: Collective, clock: Clock
) -> tuple[TransportReady, ModelRunner[Any]]:
    """The pool and the weights. On a CPU the pool is memory that the transport allocates, on a GPU the engine's."""
    engine, transport = threads
    staging_nbytes = config.transport.staging_bytes
    nbytes = plan.layout.pool_nbytes + staging_nbytes

    def load(buffer: memoryview | None, extra_nbytes: int) -> ModelRunner[Any]:
        """On the engine thread: the number of compute threads is a setting of the calling thread."""
        import torch

        from pd_serve.engine.loader import load_runner

        if config.engine.threads and plan.device.type == "cpu":
            torch.set_num_threads(config.engine.threads)
        return load_runner(plan, buffer, clock, extra_nbytes, group)

    if plan.device.type == "cpu":
        ready = transport.start(AllocatePool(nbytes), TRANSPORT_START_S)
        return ready, engine.call(partial(load, ready.region.buffer, 0)).result()
    runner = engine.call(partial(load, None, staging_nbytes)).result()
    return transport.start(RegisterPool(runner.cache.address, nbytes, f"cuda:{plan.device.index or 0}"), TRANSPORT_START_S), runner


def _warm_up(runner: ModelRunner[Any], plan: EnginePlan, config: Config, group: Collective) -> int:
    from pd_serve.engine.warm_up import WarmUpPlan, warm_up

    engine = config.engine
    sizes = WarmUpPlan(plan.layout, plan.max_len, engine.max_batch_tokens, engine.max_running, engine.warm_up_s)
    return warm_up(runner, sizes, group, MonotonicClock())


def _packer(plan: EnginePlan, config: Config, runner: ModelRunner[Any]) -> UsePacker:
    from workers.prefill.packer import TorchPacker

    transport = config.transport
    packer = TorchPacker(runner.cache, runner.cache.region)
    return UsePacker(packer, plan.layout.pool_nbytes, transport.staging_bytes, transport.staging_slot_bytes)


def _transport_settings(spec: RankSpec) -> TransportSettings:
    worker, transport = spec.config.worker, spec.config.transport
    return TransportSettings(
        self_id=rank_peer(spec.peer, spec.rank),
        secret=spec.config.security.cluster_secret.encode(),
        host=worker.advertise if is_wildcard(worker.host) and worker.advertise else worker.host,
        host_id=host_id(),
        lanes=transport.lanes,
        min_bandwidth=transport.min_bandwidth,
        join_timeout_s=transport.join_timeout_s,
        probe_nbytes=transport.probe_bytes,
        binding=transport.binding,
    )


def _settle_threads(config: Config) -> None:
    """Cores and OpenMP, as the front has set them already; for a rank started otherwise."""
    cores = parse_cores(config.engine.cpu_affinity)
    if cores:
        os.sched_setaffinity(0, cores)
    if config.engine.threads:
        for name, value in thread_env(config.engine.threads).items():
            os.environ.setdefault(name, value)


def _log_progress(what: str, done: int, total: int) -> None:
    _log.info("%s%s", what, f" ({done}/{total})" if total else "")
