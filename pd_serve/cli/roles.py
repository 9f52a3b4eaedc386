"""Run one role in the foreground. The applications are named as strings: only the one that runs is loaded."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from pd_serve.config import Config
from pd_serve.config_sources import RoleTable, Sources, load_config
from pd_serve.protocol.link import Role

ROUTER_APP = "router.main:serve_router"
WORKER_APP = "workers.front:serve_worker"
ROLES = {RoleTable.PREFILL: Role.PREFILL, RoleTable.DECODE: Role.DECODE, RoleTable.COLOCATED: Role.BOTH}


def run_router(sources: Sources) -> int:
    serve: Callable[[Config], int] = _load(ROUTER_APP)
    return serve(load_config(sources))


def run_worker(role: RoleTable, sources: Sources) -> int:
    config = load_config(sources, role)
    serve: Callable[[Config, Role], int] = _load(WORKER_APP)
    return serve(config, ROLES[role])


def _load(name: str) -> Callable[..., int]:
    module, _, attribute = name.partition(":")
    function: Callable[..., int] = getattr(import_module(module), attribute)
    return function
