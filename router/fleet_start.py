"""Starts what acts on the fleet in one process of a router: FleetControl for the admin API, and the role loop where it is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pd_serve.tls import client_tls
from router.fleet import FleetControl, FleetSettings
from router.role_loop import RoleLoop
from router.services import Services


@contextmanager
def fleet_control(services: Services, index: int) -> Iterator[FleetControl]:
    """Sets `services.fleet`. `index`: of this process; roles are switched by the first. Call within the event loop."""
    config = services.config
    settings = FleetSettings(config.security.cluster_secret, client_tls(config.security), config.worker.drain_deadline_s)
    fleet = services.fleet = FleetControl(settings, services.pool, services.dispatcher.timeline, services.metrics)
    if services.siblings is not None:
        fleet.tell = services.siblings.fleet_changed
    switching = None
    if config.roles.auto and index == 0:
        loop = RoleLoop(config, services.pool, fleet, services.occupancy, services.metrics)
        switching = asyncio.create_task(loop.run(), name="roles")
    try:
        yield fleet
    finally:
        if switching is not None:
            switching.cancel()
        fleet.close()
