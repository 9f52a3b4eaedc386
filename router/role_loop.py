"""Looks at the cluster every `roles.interval_s`, asks the controller (roles.py), and has the fleet do what it says. A task of one process.

Of a router of several processes only the first runs it: what workers report and how many requests wait is the same at each. Of several
routers only one should (`roles.auto`); where two do, each sees the other's switches and then waits `roles.min_dwell_s`, as after its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from pd_serve.config import Config
from pd_serve.errors import PdServeError
from pd_serve.observe import Histogram, Metrics
from router.fleet import FleetControl
from router.linked_worker import LinkedWorker
from router.occupancy import Occupancy
from router.pool import WorkerPool
from router.roles import Look, RoleController, WorkerUse

logger = logging.getLogger(__name__)


class Attainment:
    """Share of a histogram's values within an objective, over about the last `window_s`; costs nothing where they are observed."""

    def __init__(self, histogram: Histogram, objective_s: float, window_s: float) -> None:
        self._histogram = histogram
        self._objective_s = objective_s
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque()

    def now(self, now: float) -> float | None:
        """None: no objective, or nothing was observed."""
        if not self._objective_s:
            return None
        met, total = self._histogram.counts_up_to(self._objective_s)
        self._seen.append((now, met, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window_s:
            self._seen.popleft()
        _, met_before, total_before = self._seen[0]
        return (met - met_before) / (total - total_before) if total > total_before else None


class RoleLoop:
    def __init__(self, config: Config, pool: WorkerPool, fleet: FleetControl, occupancy: Occupancy, metrics: Metrics) -> None:
        roles = config.roles
        self._config = config
        self._pool = pool
        self._fleet = fleet
        self._occupancy = occupancy
        self._controller = RoleController(roles)
        window_s = max(roles.hold_s, 10 * roles.interval_s)
        self._ttft = Attainment(metrics.histogram("pd_serve_time_to_first_token_seconds"), roles.ttft_slo_s, window_s)
        self._itl = Attainment(metrics.histogram("pd_serve_inter_token_latency_seconds"), roles.itl_slo_s, window_s)

    async def run(self) -> None:
        """Until cancelled. A task root: a look that fails is logged, the next one comes."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._config.roles.interval_s)
            switch = self._controller.decide(self.look(clock()), clock())
            if switch is None:
                continue
            try:
                await self._fleet.set_role(switch.peer.worker_id, switch.role, self._config.roles.deadline_s, switch.reason)
            except PdServeError as error:
                logger.warning("%s was to become %s (%s): %s", switch.peer, switch.role.value, switch.reason, error.message)

    def look(self, now: float) -> Look:
        workers = tuple(map(self._use, (worker for worker in self._pool.workers if worker.is_available)))
        return Look(workers, self._occupancy.num_queued, self._ttft.now(now), self._itl.now(now))

    def _use(self, worker: LinkedWorker) -> WorkerUse:
        load, engine = worker.load, self._config.engine
        blocks = load.blocks
        kv_use = 1 - (blocks.free + blocks.cached) / blocks.total
        return WorkerUse(
            peer=worker.peer,
            role=load.role,
            prefill_use=min(1.0, load.prefill_queue_tokens / engine.max_batch_tokens),
            decode_use=max(kv_use, (load.running + load.waiting) / engine.max_running),
            num_tokens=load.prefill_queue_tokens + load.decode_context_tokens,
        )
