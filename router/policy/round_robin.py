"""Every route in turn: for comparison, and for workers that are all alike."""

from __future__ import annotations

from collections.abc import Sequence

from pd_serve.ids import PeerId
from router.policy.base import Demand, Route


class RoundRobin:
    """The prefill and the decode that were used longest ago, each on its own."""

    def __init__(self) -> None:
        self._turn = 0
        self._used_at: dict[PeerId, int] = {}

    def choose(self, demand: Demand, routes: Sequence[Route]) -> Route:
        chosen = min(routes, key=self._age)
        self._turn += 1
        for worker in (chosen.prefill, chosen.decode):
            if worker is not None:
                self._used_at[worker.peer] = self._turn
        return chosen

    def _age(self, route: Route) -> tuple[int, int]:
        prefill = 0 if route.prefill is None else self._used_at.get(route.prefill.peer, 0)
        return self._used_at.get(route.decode.peer, 0), prefill
