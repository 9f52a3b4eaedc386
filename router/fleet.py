"""What operators, and the role controller, do to the fleet: add, remove, drain, switch roles. Each is written to the log.

    add      the address is followed until it is removed; every process of this router is told
    remove   nothing new is sent there; when what this router has there has ended (or the time is up, or at once), the link is closed and
             the worker is not linked again before it is added or started anew. The worker itself goes on, for other routers
    drain    the worker takes nothing new from anybody, finishes what it has, and ends
    role     the worker takes the new role's work at once, and all routers route by it; what it has of the old role it finishes, or
             after a deadline gives back to be moved

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pd_serve.errors import AuthenticationError, InvalidRequestError, NotFoundError, PdServeError, UnavailableError
from pd_serve.ids import PeerId
from pd_serve.observe import Metrics
from pd_serve.protocol.admin import Fleet, FleetAddress, FleetWorker, RoleSwitched
from pd_serve.protocol.client import ControlClient
from pd_serve.protocol.link import Role
from pd_serve.protocol.siblings import FleetChange, WorkerAdded, WorkerRemoved
from router.linked_worker import LinkedWorker
from router.pool import WorkerPool
from router.timeline import Timeline
from router.worker_status import status_of

logger = logging.getLogger(__name__)

ROLE_TIMEOUT_S = 5.0
"""In which a worker must have told of its new role."""


class UnknownWorkerError(NotFoundError):
    code = "unknown_worker"


class LastOfItsRoleError(InvalidRequestError):
    code = "last_of_its_role"
    http_status = 409


@dataclass(frozen=True, slots=True)
class FleetSettings:
    cluster_secret: str
    tls: ssl.SSLContext
    drain_deadline_s: float


class FleetControl:
    """`tell`: passes a change on to the other processes of this router."""

    def __init__(self, settings: FleetSettings, pool: WorkerPool, timeline: Timeline, metrics: Metrics) -> None:
        self._settings = settings
        self._pool = pool
        self._timeline = timeline
        self._metrics = metrics
        self._leaving: dict[PeerId, asyncio.Task[None]] = {}
        self._switching = asyncio.Lock()
        """One role after another: each must see what the one before has left."""
        self.tell: Callable[[FleetChange], None] = lambda change: None

    def fleet(self) -> Fleet:
        pool = self._pool
        workers = sorted(pool.workers, key=lambda worker: worker.peer)
        return Fleet(workers=tuple(map(self._shown, workers)), unlinked=pool.unlinked(), removed=pool.removed)

    # ---- who belongs to it

    def add(self, address: str) -> FleetAddress | FleetWorker:
        """Raises OverloadedError above the pool's limit."""
        self._pool.add(address)
        self.tell(WorkerAdded(address))
        linked = next((worker for worker in self._pool.workers if worker.address == address), None)
        if linked is not None:
            linked.is_leaving = False
            return self._shown(linked)
        return next(place for place in self._pool.unlinked() if place.address == address)

    def remove(self, name: str, force: bool) -> FleetWorker | FleetAddress:
        """A worker by its id, or an address that has none by its host:port. Raises UnknownWorkerError."""
        worker = self._pool.find(name)
        if worker is None:
            place = next((place for place in self._pool.unlinked() if name in (place.worker, place.address.partition("//")[2])), None)
            if place is None:
                raise UnknownWorkerError(f"there is no worker {name!r}")
            self._pool.let_go(place.address)
            self.tell(WorkerRemoved(place.worker or "", 0, place.address, force))
            return place
        self._remove(worker, force)
        self.tell(WorkerRemoved(worker.peer.worker_id, worker.peer.incarnation, worker.address, force))
        return self._shown(worker)

    def changed(self, change: FleetChange) -> None:
        """At another process of this router."""
        match change:
            case WorkerAdded(address):
                self._pool.add(address)
                for worker in self._pool.workers:
                    worker.is_leaving = worker.is_leaving and worker.address != address
            case WorkerRemoved(worker_id, incarnation, address, force):
                linked = self._pool.find(worker_id)
                if linked is not None and linked.peer.incarnation == incarnation:
                    self._remove(linked, force)
                else:
                    if worker_id:
                        self._pool.ban(worker_id, incarnation, address)
                    self._pool.let_go(address)

    def close(self) -> None:
        """Idempotent."""
        for task in self._leaving.values():
            task.cancel()

    def _remove(self, worker: LinkedWorker, force: bool) -> None:
        self._pool.leave(worker)
        if force:
            self._pool.let_go(worker.address)
        elif worker.peer not in self._leaving:
            self._leaving[worker.peer] = asyncio.create_task(self._see_off(worker), name=f"remove {worker.peer}")

    async def _see_off(self, worker: LinkedWorker) -> None:
        """Let go of it when nothing of ours is there any more, or the time is up. A task root: nobody waits for it."""
        try:
            is_done = await worker.until(
                lambda: not worker.is_leaving or not self._timeline.is_using(worker.peer), self._settings.drain_deadline_s
            )
            if worker.is_leaving:
                logger.info("let go of %s: %s", worker.peer, "nothing runs there" if is_done else "its time is up, or its link has ended")
                self._pool.let_go(worker.address)
        finally:
            self._leaving.pop(worker.peer, None)

    # ---- what they do

    async def drain(self, worker_id: str, deadline_s: float) -> FleetWorker:
        """Raises UnknownWorkerError, or UnavailableError when the worker does not answer."""
        worker = self._found(worker_id)
        await self._call(worker, lambda control: control.drain(deadline_s))
        return self._shown(worker)

    async def set_role(self, worker_id: str, role: Role, deadline_s: float, reason: str) -> RoleSwitched:
        """Returns when the worker has told that it works in the new role.

        Raises UnknownWorkerError, LastOfItsRoleError when nothing that decodes would be left, UnavailableError when it does not answer.
        """
        async with self._switching:
            worker = self._found(worker_id)
            previous = worker.load.role
            others = (other for other in self._pool.workers if other is not worker and other.is_available)
            if role is Role.PREFILL and previous is not role and not any(other.can_decode for other in others):
                raise LastOfItsRoleError(f"{worker_id} is the last worker that decodes")
            clock = asyncio.get_running_loop().time
            began_at = clock()
            await self._call(worker, lambda control: control.set_role(role, deadline_s))
            if not await worker.until(lambda: worker.load.role is role, ROLE_TIMEOUT_S):
                raise UnavailableError(f"{worker.peer} took the role {role.value} and has not told of it")
        took_s = clock() - began_at
        if previous is not role:
            self._metrics.count("pd_serve_role_switches_total", previous.value, role.value, reason)
            self._metrics.record("pd_serve_role_switch_seconds", took_s)
            logger.info("%s: %s -> %s after %.1f ms (%s)", worker.peer, previous.value, role.value, 1e3 * took_s, reason)
        return RoleSwitched(worker=self._shown(worker), previous=previous, seconds=took_s)

    async def _call(self, worker: LinkedWorker, ask: Callable[[ControlClient], Awaitable[None]]) -> None:
        settings = self._settings
        async with ControlClient(worker.address, settings.cluster_secret, tls=settings.tls) as control:
            try:
                await ask(control)
            except AuthenticationError as error:
                raise UnavailableError(f"{worker.peer} has another cluster secret") from error
            except PdServeError as error:
                raise UnavailableError(f"{worker.peer}: {error.message}") from error

    def _found(self, worker_id: str) -> LinkedWorker:
        worker = self._pool.find(worker_id)
        if worker is None:
            raise UnknownWorkerError(f"there is no worker {worker_id!r}")
        return worker

    def _shown(self, worker: LinkedWorker) -> FleetWorker:
        status = status_of(worker, self._pool.breakers, asyncio.get_running_loop().time())
        return FleetWorker(status=status, leaving=worker.is_leaving)
