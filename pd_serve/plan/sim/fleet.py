"""simulate(): a cluster of modelled workers under the router's own code, from the first request to the last.

    simulate(FleetSpec((Group(Role.PREFILL, 3, model), Group(Role.DECODE, 5, model)), LinkSpec(50e9), config), requests, slo) -> Outcome

The same arguments give the same outcome, bit for bit. At the end of every run nothing is open anywhere, or SimulationError is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import cast

from pd_serve.bench.statistics import Slo
from pd_serve.plan.errors import PlanError
from pd_serve.plan.outcome import Outcome
from pd_serve.plan.sim.clients import Clients
from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.network import LinkSpec
from pd_serve.plan.sim.node import NodeSettings, Surroundings
from pd_serve.plan.sim.router_side import Rhythm, RouterSide
from pd_serve.plan.sim.spec import Drain, Failure, FleetSpec, Group, Retries
from pd_serve.plan.sim.watch import Look, RoleLook, Watch
from pd_serve.plan.sim.workers import Workers
from pd_serve.plan.workload import PlannedRequest, Requests
from pd_serve.protocol.link import Role
from router.fleet import FleetControl
from router.pool import WorkerPool
from router.role_loop import RoleLoop

__all__ = [
    "Drain",
    "Failure",
    "FleetSpec",
    "Group",
    "LinkSpec",
    "Look",
    "Retries",
    "RoleLook",
    "Simulation",
    "SimulationError",
    "simulate",
]

_NO_SLO = Slo()


class SimulationError(AssertionError):
    """A run left something behind: an error of the simulator."""


def simulate(
    spec: FleetSpec,
    requests: Requests,
    slo: Slo = _NO_SLO,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    watch: Callable[[Look], None] | None = None,
) -> Outcome:
    """Until every request is answered, turned away or given up. `progress` hears now and then how many are over; `watch` has a look in
    every virtual second. Raises PlanError for a fleet that cannot be, ConfigError for a router's settings that cannot be.
    """
    return Simulation(spec, requests, slo, seed).run(progress, watch)


class Simulation:
    """One run."""

    def __init__(self, spec: FleetSpec, requests: Requests, slo: Slo, seed: int) -> None:
        spec.check()
        first = next(requests, None)
        if first is None:
            raise PlanError("there are no requests to simulate")
        self.loop = loop = VirtualLoop()
        self.outcome = Outcome(slo, spec.num_gpus)
        self._config = config = spec.router_config()
        block_tokens = first.block_tokens
        with loop.running():
            self.router = RouterSide(loop, config, Rhythm(spec.cluster_report_s, block_tokens, spec.link.bytes_per_s))
        around = Surroundings(loop, random.Random(seed), self._add_gaps if config.roles.auto else self.outcome.add_gaps)
        around.hear, around.changed = self.router.pool.hear, self.router.pool.changed
        settings = NodeSettings(
            link=spec.link,
            block_size=config.kv.block_size,
            cache_block_tokens=block_tokens,
            headroom_tokens=config.kv.headroom_tokens,
            tells_cache=self.router.chooser.reads_cached,
            late_s=slo.itl_s,
        )
        self.workers = Workers(spec, settings, around, self.router, self.outcome)
        self.clients = Clients(loop, self.router, _again(first, requests), self.outcome, spec.retries)
        self._roles: asyncio.Task[object] | None = None
        self._request_s = max(group.model.request_s for group in spec.groups)

    def run(self, progress: Callable[[int], None] | None = None, watch: Callable[[Look], None] | None = None) -> Outcome:
        self.workers.start()
        if watch is not None:
            Watch(self.loop, lambda: self.workers.nodes, lambda: self.router.dispatcher.num_queued, watch).start()
        if self._config.roles.auto:
            self.loop.soon(self._switch_roles)
        self.clients.start(self._request_s, progress)
        self.loop.run(lambda: self.clients.is_over() and self.workers.is_idle())
        if self._roles is not None:
            self._roles.cancel()
            self.loop.run(lambda: True)
        self.workers.account()
        self._check()
        return self.outcome

    def _switch_roles(self) -> None:
        """The router's own loop, as a task."""
        router = self.router
        fleet = cast(FleetControl, _RoleControl(self.workers))
        loop = RoleLoop(self._config, cast(WorkerPool, router.pool), fleet, router.occupancy, router.metrics)
        self._roles = self.loop.create_task(loop.run())

    def _add_gaps(self, seconds: float, num_tokens: int) -> None:
        self.outcome.add_gaps(seconds, num_tokens)
        self.router.metrics.gaps.add(seconds, num_tokens)

    def _check(self) -> None:
        """Raises SimulationError."""
        if not self.clients.is_over():
            raise SimulationError(f"{self.clients.num_begun - self.clients.num_over} requests were never answered")
        if not self.router.is_empty():
            raise SimulationError("the router still counts something")
        for node in self.workers.nodes:
            if node.pool.num_held or not node.is_idle:
                raise SimulationError(f"{node.peer} holds {node.pool.num_held} tokens of KV for nobody")


class _RoleControl:
    """Plays FleetControl for the role loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    async def set_role(self, worker_id: str, role: Role, deadline_s: float, reason: str) -> None:
        self._workers.set_role(worker_id, role, deadline_s, reason)


def _again(first: PlannedRequest, rest: Requests) -> Requests:
    """As they were before the first was looked at. Raises PlanError for blocks of different lengths: caches know one."""
    yield first
    for request in rest:
        if request.block_keys and request.block_tokens != first.block_tokens:
            raise PlanError(f"prompts have blocks of {first.block_tokens} and of {request.block_tokens} tokens")
        yield request
