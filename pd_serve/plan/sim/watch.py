"""Looks at a simulation in regular intervals, for pictures over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pd_serve.plan.sim.events import VirtualLoop
from pd_serve.plan.sim.node import Node


class RoleLook(NamedTuple):
    """All workers of one role."""

    busy_share: float
    """In steps, since the last look."""
    num_running: int
    num_waiting: int


class Look(NamedTuple):
    at_s: float
    num_queued: int
    """In the router."""
    roles: dict[str, RoleLook]


class Watch:
    """look() every `every_s`, from start() on."""

    def __init__(
        self,
        loop: VirtualLoop,
        nodes: Callable[[], tuple[Node, ...]],
        num_queued: Callable[[], int],
        tell: Callable[[Look], None],
        every_s: float = 1.0,
    ) -> None:
        self._loop = loop
        self._nodes = nodes
        self._num_queued = num_queued
        self._tell = tell
        self._every_s = every_s
        self._busy_s: dict[int, float] = {}
        """By id of the node, at the last look."""

    def start(self) -> None:
        self._loop.at(self._loop.now() + self._every_s, self._look)

    def _look(self) -> None:
        busy: dict[str, list[float]] = {}
        counts: dict[str, tuple[int, int]] = {}
        before, self._busy_s = self._busy_s, {}
        for node in self._nodes():
            role, steps = node.role.value, node.steps
            busy_s = self._busy_s[id(node)] = steps.busy_by_now()
            busy.setdefault(role, []).append((busy_s - before.get(id(node), 0.0)) / self._every_s)
            running, waiting = counts.get(role, (0, 0))
            counts[role] = running + steps.num_running, waiting + steps.num_waiting
        roles = {role: RoleLook(sum(shares) / len(shares), *counts[role]) for role, shares in busy.items()}
        self._tell(Look(self._loop.now(), self._num_queued(), roles))
        self.start()
