"""What was chosen, as files to start it with: a compose file in the manner of docker/compose.xpyd.yaml, and the settings it mounts.

The settings alone start the same fleet on one machine: `pd-serve up --config pd-serve.toml`. Secrets are in neither; the compose file asks
for CLUSTER_SECRET. On CUDA each worker is a service with its own devices; on a CPU workers that are alike are replicas of one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pd_serve.config import Config
from pd_serve.config_sources import SECRET_KEYS, known_keys, settings_toml
from pd_serve.plan.candidates import Candidate, Pool
from pd_serve.plan.errors import PlanError
from pd_serve.protocol.link import Role

COMPOSE_FILE = "compose.yaml"
SETTINGS_FILE = "pd-serve.toml"
_COMMANDS = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "colocated"}
_PORTS = {Role.PREFILL: 8100, Role.DECODE: 8200, Role.BOTH: 8300}
_STOP_MARGIN_S = 15


@dataclass(frozen=True, slots=True)
class Deployment:
    """A fleet with what it runs."""

    candidate: Candidate
    model_id: str
    """Hugging Face id, `demo`, or an absolute folder, which is mounted."""
    config: Config
    """The router's, as simulated."""
    is_cuda: bool
    because: tuple[str, ...] = ()
    """Lines for the head of the files: what was asked, what is expected."""


def write_deployment(deployment: Deployment, folder: Path) -> tuple[Path, Path]:
    """The compose file and the settings beside it. Raises PlanError."""
    paths = folder / COMPOSE_FILE, folder / SETTINGS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (compose_yaml(deployment), fleet_toml(deployment)), strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write into {folder}: {error.strerror}") from error
    return paths


# ---- settings


def fleet_toml(deployment: Deployment) -> str:
    """What differs from the defaults, and a table of its own for each role."""
    candidate = deployment.candidate
    counts = {role: candidate.count(role) for role in _COMMANDS}
    lines = [*_head(deployment), f"#   pd-serve up --config {SETTINGS_FILE}", ""]
    lines += ["[launch]", *(f"{_COMMANDS[role]} = {count}" for role, count in counts.items()), ""]
    lines += ["[model]", f"id = {json.dumps(deployment.model_id)}", *_changed(deployment.config, "model", {"id"}), ""]
    lines += ["[engine]", f'device = "{"cuda" if deployment.is_cuda else "cpu"}"', *_changed(deployment.config, "engine", {"device"}), ""]
    for section in dict.fromkeys(key.partition(".")[0] for key in known_keys()):
        if section not in ("launch", "model", "engine") and (changed := _changed(deployment.config, section, set())):
            lines += [f"[{section}]", *changed, ""]
    for pool in candidate.pools:
        lines += _role_table(deployment, pool)
    return "\n".join(lines)


def _role_table(deployment: Deployment, pool: Pool) -> list[str]:
    name, model = _COMMANDS[pool.role], pool.model
    budget = deployment.candidate.chunk_budget if pool.role is Role.BOTH and deployment.candidate.chunk_budget else model.max_batch_tokens
    lines = [f"[{name}.engine]", f"max_batch_tokens = {budget}", f"max_running = {model.max_running}"]
    lines.append(f"tp = {model.num_gpus}" if deployment.is_cuda else f"threads = {model.num_gpus}")
    if not deployment.is_cuda:
        lines += ["", f"[{name}.kv]", f"memory_bytes = {_pool_nbytes(pool)}"]
    return [*lines, ""]


def _changed(config: Config, section: str, given: set[str]) -> list[str]:
    """Lines of the section that differ from the defaults; no secrets."""
    ordinary = set(_section_lines(Config(), section))
    told: list[str] = []
    for line in _section_lines(config, section):
        key = line.partition(" = ")[0]
        if line not in ordinary and key not in given and f"{section}.{key}" not in SECRET_KEYS:
            told.append(line)
    return told


def _section_lines(config: Config, section: str) -> list[str]:
    found: list[str] = []
    is_inside = False
    for line in settings_toml(config).splitlines():
        if line.startswith("["):
            is_inside = line == f"[{section}]"
        elif is_inside and line:
            found.append(line)
    return found


# ---- compose


def compose_yaml(deployment: Deployment) -> str:
    target = "cuda" if deployment.is_cuda else "cpu"
    model_mount = _model_mount(deployment)
    parts = [
        "\n".join(
            [
                *_head(deployment),
                f"#   docker build -f docker/Dockerfile --target {target} -t pd-serve:{target} .      from a checkout, once",
                f"#   CLUSTER_SECRET=$(openssl rand -hex 32) docker compose -f {COMPOSE_FILE} up",
                "#",
                "# For one host. On several, start the same command lines there, and name the router by its address in --router.",
                "# `room` does nothing but hold the namespaces that the workers share, through which they push KV.",
            ]
        ),
        "name: pd-serve-plan",
        f"x-image: &image\n  image: pd-serve:{target}",
        "x-environment: &environment\n"
        "  PD_SERVE_SECURITY_CLUSTER_SECRET: ${CLUSTER_SECRET:?set it to anything long and random}\n"
        f"  PD_SERVE_MODEL_ID: {json.dumps(model_mount[1] if model_mount else deployment.model_id)}",
        _worker_anchor(deployment, model_mount),
        "services:",
        _room(deployment),
        _router(deployment, model_mount),
        *(text for pool in deployment.candidate.pools for text in _workers(deployment, pool)),
        "volumes:\n  models:",
    ]
    return "\n\n".join(parts) + "\n"


def _worker_anchor(deployment: Deployment, model_mount: tuple[str, str] | None) -> str:
    return (
        "x-worker: &worker\n"
        "  <<: *image\n"
        "  environment: *environment\n"
        f"  volumes:\n{_volumes(model_mount, '    ')}\n"
        '  ipc: "service:room"\n'
        '  pid: "service:room"\n'
        "  restart: unless-stopped\n"
        f"  stop_grace_period: {_grace_s(deployment)}s"
    )


def _room(deployment: Deployment) -> str:
    return (
        "  room:\n"
        "    <<: *image\n"
        '    entrypoint: ["sleep", "infinity"]\n'
        "    command: []\n"
        "    init: true\n"
        "    ipc: shareable\n"
        f"    shm_size: {_shm_gib(deployment)}gb\n"
        "    restart: unless-stopped"
    )


def _router(deployment: Deployment, model_mount: tuple[str, str] | None) -> str:
    command = ["router", "--config", f"/etc/{SETTINGS_FILE}", "--host", "0.0.0.0", "--port", "8000"]
    return (
        "  router:\n"
        "    <<: *image\n"
        f"    command: {json.dumps(command)}\n"
        "    environment: *environment\n"
        "    ports:\n"
        '      - "${PORT:-8000}:8000"\n'
        f"    volumes:\n{_volumes(model_mount, '      ')}\n"
        "    restart: unless-stopped\n"
        f"    stop_grace_period: {_grace_s(deployment)}s\n"
        f"{_healthcheck(8000, 'ready', 120)}"
    )


def _workers(deployment: Deployment, pool: Pool) -> Iterator[str]:
    """A service with replicas on a CPU; one for each worker where each has devices of its own."""
    name, port = _COMMANDS[pool.role], _PORTS[pool.role]
    command = [name, "--config", f"/etc/{SETTINGS_FILE}", "--router", "http://router:8000", "--host", "0.0.0.0", "--port", str(port)]
    if deployment.is_cuda:
        command += ["--tp", str(pool.model.num_gpus)]
    lines = f"    <<: *worker\n    command: {json.dumps(command)}\n{_healthcheck(port, 'health', 300 if deployment.is_cuda else 30)}"
    if not deployment.is_cuda:
        yield f"  {name}:\n{lines}\n    deploy:\n      replicas: {pool.count}"
        return
    first = sum(other.num_gpus for other in deployment.candidate.pools[: deployment.candidate.pools.index(pool)])
    for index in range(pool.count):
        devices = [str(first + index * pool.model.num_gpus + rank) for rank in range(pool.model.num_gpus)]
        reserved = f"[{{driver: nvidia, device_ids: {json.dumps(devices)}, capabilities: [gpu]}}]"
        yield f"  {name}-{index}:\n{lines}\n    deploy:\n      resources:\n        reservations:\n          devices: {reserved}"


def _healthcheck(port: int, path: str, start_s: int) -> str:
    code = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/{path}', timeout=3)"
    return (
        "    healthcheck:\n"
        f"      test: {json.dumps(['CMD', 'python', '-c', code])}\n"
        "      interval: 5s\n"
        "      timeout: 5s\n"
        "      retries: 3\n"
        f"      start_period: {start_s}s"
    )


def _volumes(model_mount: tuple[str, str] | None, indent: str) -> str:
    mounts = ["models:/home/pdserve/.cache/pd-serve", f"./{SETTINGS_FILE}:/etc/{SETTINGS_FILE}:ro"]
    if model_mount is not None:
        mounts.append(f"{model_mount[0]}:{model_mount[1]}:ro")
    return "\n".join(f"{indent}- {json.dumps(mount) if ' ' in mount else mount}" for mount in mounts)


def _model_mount(deployment: Deployment) -> tuple[str, str] | None:
    """(folder of the host, folder in the container), of a model that is a folder."""
    path = Path(deployment.model_id)
    return (str(path), f"/models/{path.name}") if path.is_absolute() else None


def _head(deployment: Deployment) -> list[str]:
    return [
        f"# {deployment.candidate.name} for {deployment.model_id}, written by pd-serve plan simulate",
        *(f"# {line}" for line in deployment.because),
    ]


def _pool_nbytes(pool: Pool) -> int:
    return pool.model.num_kv_tokens * pool.model.kv_bytes_per_token


def _shm_gib(deployment: Deployment) -> int:
    """What holds the pools of a CPU's workers; on CUDA they are in device memory, and this is for the transport."""
    if deployment.is_cuda:
        return 4
    nbytes = sum(pool.count * _pool_nbytes(pool) for pool in deployment.candidate.pools)
    return max(1, math.ceil(1.1 * nbytes / 2**30))


def _grace_s(deployment: Deployment) -> int:
    return math.ceil(deployment.config.worker.drain_deadline_s) + _STOP_MARGIN_S
