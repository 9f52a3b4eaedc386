"""Faults that strike one process at a time: what can be done to it, drawn from a seed, and when all is whole again.

Whatever ends is started again, as an orchestrator does; that something ends which nobody ended is a failure of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import httpx

from tests.faults.separate import SeparateCluster
from tests.faults.whole import is_whole
from tests.pids import send

RECOVERY_TIMEOUT_S = 90.0
CLEAN_OF_A_ROUTER_S = 5.0
DRAIN_MARGIN_S = 10.0
"""Beyond worker.drain_deadline_s."""
ROUTER = "router"
KINDS = ("kill rank", "kill front", "kill both", "stop rank shortly", "stop rank for long", "stop front", "drain")
ROUTER_KINDS = ("kill router", "stop router")
DRAINED = "stopped; 0 leases, 0 running, 0 waiting"


@dataclass(frozen=True)
class Fault:
    kind: str
    role: str
    index: int
    after_s: float
    """Seconds after all was whole."""
    stopped_s: float
    """For those that stop a process: seconds until it goes on."""


def draw_faults(seed: int, indices: dict[str, int]) -> Iterator[Fault]:
    """Without end. Every kind with every role comes once before any comes again. `indices`: how many workers a role has."""
    rng = Random(seed)
    pairs = [(kind, role) for kind in KINDS for role in indices] + [(kind, ROUTER) for kind in ROUTER_KINDS]
    while True:
        for kind, role in rng.sample(pairs, len(pairs)):
            stopped_s = {"stop rank shortly": rng.uniform(0.1, 1.0), "stop rank for long": rng.uniform(4.0, 6.0)}.get(
                kind, rng.uniform(0.3, 3.0)
            )
            yield Fault(kind, role, rng.randrange(indices.get(role, 1)), rng.uniform(0.2, 1.5), stopped_s)


class Chaos:
    """Strikes a cluster. `router_is_up` is clear from the moment a router is killed until its successor listens."""

    def __init__(self, cluster: SeparateCluster) -> None:
        self._cluster = cluster
        self.router_is_up = asyncio.Event()
        self.router_is_up.set()
        self.num_router_deaths = 0
        self.router_clean_s: list[float] = []
        """Per killed router: seconds until no worker held anything for it."""

    async def strike(self, fault: Fault) -> float:
        """Do it, wait until all is whole again; the seconds that took. Raises AssertionError for anything out of order."""
        began_at = time.monotonic()
        match fault.kind:
            case "kill router":
                await self._kill_router()
                victim, must_go = ROUTER, None
            case "stop router":
                await _stop([self._cluster.processes[ROUTER].pid], fault.stopped_s)
                victim, must_go = ROUTER, None
            case _:
                victim, must_go = await self._strike_worker(fault)
        while not await asyncio.to_thread(is_whole, self._cluster, must_go):
            if time.monotonic() > began_at + RECOVERY_TIMEOUT_S:
                raise AssertionError(f"not whole {RECOVERY_TIMEOUT_S} s after {fault}\n{self._cluster.log}")
            self._start_again(victim, fault)
            await asyncio.sleep(0.1)
        return time.monotonic() - began_at

    async def _strike_worker(self, fault: Fault) -> tuple[str, int | None]:
        """Name of the victim, and the incarnation that must go if one must."""
        worker = await asyncio.to_thread(self._cluster.worker, fault.role, fault.index)
        ranks, front, name = worker["rank_pids"], worker["pid"], worker["id"]
        match fault.kind:
            case "kill rank":
                send(ranks, signal.SIGKILL)
            case "kill front":
                send([front], signal.SIGKILL)
            case "kill both":
                send([*ranks, front], signal.SIGKILL)
            case "drain":
                await self._drain(name)
            case "stop front":
                await _stop([front], fault.stopped_s)
            case _:
                await _stop(ranks, fault.stopped_s)
        return name, worker["incarnation"] if fault.kind.startswith(("kill", "drain")) else None

    async def _drain(self, name: str) -> None:
        cluster = self._cluster
        cluster.processes[name].terminate()
        deadline_s = float(cluster.settings["worker.drain_deadline_s"]) + DRAIN_MARGIN_S
        code, _ = await asyncio.to_thread(cluster.wait_exit, name, deadline_s)
        assert code == 0, f"{name} drained with exit code {code}\n{cluster.log}"
        assert DRAINED in cluster.last_words(name), cluster.last_words(name)

    async def _kill_router(self) -> None:
        """Its successor comes when no worker holds anything any more of what the dead one had asked for."""
        cluster = self._cluster
        addresses = [worker["address"] for worker in await asyncio.to_thread(cluster.workers)]
        self.router_is_up.clear()
        self.num_router_deaths += 1
        cluster.processes[ROUTER].kill()
        killed_at = time.monotonic()
        while any([await asyncio.to_thread(num_held_at, address) for address in addresses]):
            assert time.monotonic() < killed_at + CLEAN_OF_A_ROUTER_S, f"held for a router that is dead\n{cluster.log}"
            await asyncio.sleep(0.02)
        self.router_clean_s.append(time.monotonic() - killed_at)
        await asyncio.to_thread(cluster.wait_exit, ROUTER)
        cluster.start_process(ROUTER)
        while not await asyncio.to_thread(is_listening, cluster):
            assert time.monotonic() < killed_at + RECOVERY_TIMEOUT_S, f"no router listens\n{cluster.log}"
            await asyncio.sleep(0.05)
        self.router_is_up.set()

    def _start_again(self, victim: str, fault: Fault) -> None:
        for name, code in self._cluster.ended().items():
            assert name == victim, f"{name} ended with {code} after {fault}\n{self._cluster.log}"
            self._cluster.start_process(name)


def num_held_at(address: str) -> int:
    """Requests, leases and blocks, as the worker itself tells."""
    status = httpx.get(f"{address}/control/status", timeout=60).json()
    return int(status["leases"] + status["running"] + status["waiting"] + status["blocks"]["leased"] + status["blocks"]["quarantined"])


def is_listening(cluster: SeparateCluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


async def _stop(pids: list[int], seconds: float) -> None:
    send(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        send(pids, signal.SIGCONT)  # a stopped one may have been fenced
