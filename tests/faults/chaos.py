"""Faults that strike one worker at a time: what can be done to its processes, drawn from a seed, and when all is whole again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from tests.cluster import Cluster

RECOVERY_TIMEOUT_S = 90.0
KINDS = ("kill rank", "kill front", "kill both", "stop rank shortly", "stop rank for long", "stop front")


@dataclass(frozen=True)
class Fault:
    kind: str
    role: str
    index: int
    after_s: float
    """Seconds after all was whole."""
    stopped_s: float
    """For those that stop a process: seconds until it goes on."""


def draw_faults(seed: int, indices: dict[str, int]) -> Any:
    """Without end. Every kind with every role comes once before any comes again. `indices`: how many workers a role has."""
    rng = Random(seed)
    while True:
        pairs = [(kind, role) for kind in KINDS for role in indices]
        for kind, role in rng.sample(pairs, len(pairs)):
            stopped_s = {"stop rank shortly": rng.uniform(0.1, 1.0), "stop rank for long": rng.uniform(4.0, 6.0)}.get(
                kind, rng.uniform(0.3, 3.0)
            )
            yield Fault(kind, role, rng.randrange(indices[role]), rng.uniform(0.2, 1.5), stopped_s)


async def strike(cluster: Cluster, fault: Fault) -> float:
    """Do it, wait until all is whole again; the seconds that took."""
    worker = await asyncio.to_thread(cluster.worker, fault.role, fault.index)
    ranks, front = worker["rank_pids"], worker["pid"]
    began_at = time.monotonic()
    match fault.kind:
        case "kill rank":
            _signal(ranks, signal.SIGKILL)
        case "kill front":
            _signal([front], signal.SIGKILL)
        case "kill both":
            _signal([*ranks, front], signal.SIGKILL)
        case "stop front":
            await _stop([front], fault.stopped_s)
        case _:
            await _stop(ranks, fault.stopped_s)
    must_go = worker["incarnation"] if fault.kind.startswith("kill") else None
    while not await asyncio.to_thread(is_whole, cluster, must_go):
        if time.monotonic() > began_at + RECOVERY_TIMEOUT_S:
            raise AssertionError(f"not whole {RECOVERY_TIMEOUT_S} s after {fault}\n{cluster.log}")
        await asyncio.sleep(0.1)
    return time.monotonic() - began_at


async def _stop(pids: list[int], seconds: float) -> None:
    _signal(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], signum: signal.Signals) -> None:
    """To those that are still there: a stopped one may have been fenced."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def is_whole(cluster: Cluster, must_go: int | None = None) -> bool:
    """All workers that were started are ready, those of different roles have joined, and incarnation `must_go` is not among them."""
    try:
        workers = cluster.workers()
    except httpx.HTTPError:
        return False
    if len(workers) != cluster.prefill + cluster.decode + cluster.colocated or not all(worker["ready"] for worker in workers):
        return False
    if any(worker["incarnation"] == must_go for worker in workers):
        return False
    names = {f"{worker['id']}@{worker['incarnation']:016x}": worker["role"] for worker in workers}
    for worker in workers:
        joined = {peer["peer"] for peer in worker["peers"] if peer["joined"]}
        if not {name for name, role in names.items() if role != worker["role"]} <= joined:
            return False
    return True
