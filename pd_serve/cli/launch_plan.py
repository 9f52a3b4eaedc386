"""Which processes `pd-serve up` starts, and with which settings. Decides; starts nothing.

Every child gets a file of its own with all settings resolved, and an environment without PD_SERVE_ variables: what was merged here is what
runs. The file is also what one passes to `pd-serve decode --config` to run that process again by hand.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pd_serve.addresses import bound_socket, http_address, is_loopback, is_wildcard
from pd_serve.config import Config, WorkerConfig
from pd_serve.config_sources import ENV_PREFIX, RoleTable, Sources, load_config
from pd_serve.cores import divide_cores, thread_env
from pd_serve.errors import ConfigError

ROUTER = "router"
PROGRAM = (sys.executable, "-m", "pd_serve.cli")
"""`pd-serve`, whatever is on the PATH."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the plan is made for."""

    num_cores: int
    gpus: tuple[str, ...]
    """Names for CUDA_VISIBLE_DEVICES; empty without a GPU."""


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One child: its command is `program` <role> --config <file>."""

    name: str
    role: str
    """`router`, `prefill`, `decode`, `colocated`: also the command that runs it."""
    address: str
    """http(s)://host:port at which this machine reaches it."""
    config: Config
    env: Mapping[str, str]
    """Added to the launcher's environment."""
    program: tuple[str, ...] = PROGRAM

    @property
    def num_threads(self) -> int:
        """Compute threads; 0 for the router, which computes nothing."""
        return 0 if self.role == ROUTER else self.config.engine.threads


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    router: ProcessPlan
    workers: tuple[ProcessPlan, ...]
    config: Config
    """Of the launcher itself."""

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        return (self.router, *self.workers)


def plan_launch(sources: Sources, machine: Machine, resolve_model: Callable[[str, str], Path]) -> LaunchPlan:
    """Raises ConfigError, and whatever resolve_model(id, cache_dir) raises; it is called once for each different model.

    Ports are chosen here and free at that moment.
    """
    base = load_config(sources)
    counts = {
        RoleTable.PREFILL: base.launch.prefill,
        RoleTable.DECODE: base.launch.decode,
        RoleTable.COLOCATED: base.launch.colocated,
    }
    if counts[RoleTable.DECODE] + counts[RoleTable.COLOCATED] == 0:
        raise ConfigError("nothing would decode: start at least one decode or colocated worker")
    configs = {role: load_config(sources, role) for role in RoleTable}
    base, configs = _with_secret(base, configs)
    folders: dict[tuple[str, str], Path] = {}
    for config in (base, *(configs[role] for role, count in counts.items() if count)):
        key = (config.model.id, config.model.cache_dir)
        if key not in folders:
            folders[key] = resolve_model(*key)
    base = _with_model(base, folders)
    router_port, *ports = _choose_ports(base, counts, configs)
    router = _plan_router(base, router_port)
    workers: list[ProcessPlan] = []
    threads = divide_cores(machine.num_cores, sum(counts.values()))
    num_ranks = 0
    for role, count in counts.items():
        for index in range(count):
            position = len(workers)
            config = _with_model(configs[role], folders)
            config = _with_place(config, f"{role.value}-{index}", ports[position], router.address)
            config = _with_threads(config, threads[position])
            workers.append(_plan_worker(role, config, _gpu_env(config, machine, num_ranks)))
            num_ranks += config.engine.tp
    return LaunchPlan(router, tuple(workers), base)


def child_env(environ: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    return {**kept, **added}


# ---- helpers


def _with_secret(base: Config, configs: dict[RoleTable, Config]) -> tuple[Config, dict[RoleTable, Config]]:
    """One for this run, where something listens beyond loopback and none is set."""
    hosts = (base.router.host, *(config.worker.host for config in configs.values()))
    if base.security.cluster_secret or all(is_loopback(host) for host in hosts):
        return base, configs
    drawn = {"cluster_secret": secrets.token_hex(32)}
    security = base.security.model_copy(update=drawn)
    return _replace(base, security=security), {role: _replace(config, security=security) for role, config in configs.items()}


def _with_model(config: Config, folders: Mapping[tuple[str, str], Path]) -> Config:
    model = config.model
    name = model.name or Path(model.id).name
    return _replace(config, model=model.model_copy(update={"id": str(folders[model.id, model.cache_dir]), "name": name}))


def _with_place(config: Config, name: str, port: int, router_address: str) -> Config:
    worker = config.worker
    elsewhere = () if worker.routers == WorkerConfig().routers else worker.routers
    update = {"id": f"{worker.id}-{name}" if worker.id else name, "port": port, "routers": (router_address, *elsewhere)}
    return _replace(config, worker=worker.model_copy(update=update))


def _with_threads(config: Config, share: int) -> Config:
    """`share`: threads of the whole worker; the setting is of each of its ranks."""
    engine = config.engine
    return _replace(config, engine=engine.model_copy(update={"threads": engine.threads or max(1, share // engine.tp)}))


def _replace(config: Config, **sections: object) -> Config:
    return config.model_copy(update=sections)


def _gpu_env(config: Config, machine: Machine, num_ranks_before: int) -> dict[str, str]:
    """A device for each of the worker's ranks; shared where there are too few. Raises ConfigError for too few for one worker."""
    gpus, num_ranks = machine.gpus, config.engine.tp
    if config.engine.device == "cpu" or not gpus:
        return {}
    if num_ranks > len(gpus):
        raise ConfigError(f"engine.tp {num_ranks} needs as many devices, there are {len(gpus)}")
    chosen = [gpus[(num_ranks_before + rank) % len(gpus)] for rank in range(num_ranks)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def _plan_router(base: Config, port: int) -> ProcessPlan:
    config = _replace(base, router=base.router.model_copy(update={"port": port}))
    return ProcessPlan(ROUTER, ROUTER, http_address(_reachable(config.router.host), port, bool(config.security.tls_cert)), config, {})


def _plan_worker(role: RoleTable, config: Config, gpu_env: Mapping[str, str]) -> ProcessPlan:
    address = http_address(_reachable(config.worker.host), config.worker.port, bool(config.security.tls_cert))
    return ProcessPlan(config.worker.id, role.value, address, config, {**thread_env(config.engine.threads), **gpu_env})


def _reachable(host: str) -> str:
    return "127.0.0.1" if is_wildcard(host) else host


def _choose_ports(base: Config, counts: Mapping[RoleTable, int], configs: Mapping[RoleTable, Config]) -> list[int]:
    """The router's, then one per worker in order. All are held open until the last is chosen, so that none is given twice."""
    wanted = [(base.router.host, base.router.port)]
    for role, count in counts.items():
        worker = configs[role].worker
        wanted += [(worker.host, worker.port + index if worker.port else 0) for index in range(count)]
    held: list[socket.socket] = []
    try:
        for host, port in wanted:
            held.append(bound_socket(host, port))
            held[-1].listen(1)
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()
