"""The workers of a simulation by their places in the fleet: they start, die, come back, are drained and change roles."""

from __future__ import annotations

from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.plan.outcome import Outcome
from pd_serve.plan.sim.node import Node, NodeSettings, Surroundings
from pd_serve.plan.sim.prompts import Leg
from pd_serve.plan.sim.router_side import RouterSide
from pd_serve.plan.sim.spec import Drain, Failure, FleetSpec
from pd_serve.protocol.link import Role

_LEAVING = {Role.PREFILL: frozenset({Leg.DECODE, Leg.LOCAL}), Role.DECODE: frozenset({Leg.PREFILL}), Role.BOTH: frozenset[Leg]()}
"""What a worker of this role has of its old one."""
_LOOK_AGAIN_S = 0.1


class Workers:
    """start -> (fail, drain, set_role)* -> account."""

    def __init__(self, spec: FleetSpec, settings: NodeSettings, around: Surroundings, router: RouterSide, outcome: Outcome) -> None:
        self._spec = spec
        self._settings = settings
        self._around = around
        self._loop = around.loop
        self._pool = router.pool
        self._metrics = router.metrics
        self._outcome = outcome
        self._groups = spec.places()
        self._num_started = [0] * len(self._groups)
        self._nodes: dict[int, Node] = {}
        """By place; those that live."""
        self._counted: dict[PeerId, tuple[float, float]] = {}
        """Until when, and up to which busy_s, each has been accounted for."""

    def start(self) -> None:
        self._start(range(len(self._groups)))
        for event in self._spec.failures:
            self._loop.at(event.at_s, self.fail if isinstance(event, Failure) else self.drain, event)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    def is_idle(self) -> bool:
        return all(node.is_idle for node in self._nodes.values())

    # ---- what happens to them

    def fail(self, failure: Failure) -> None:
        """Of one that is down already: nothing."""
        node = self._nodes.get(failure.worker)
        if node is not None:
            self._take_away(failure.worker, node)
            if failure.down_s != float("inf"):
                self._loop.at(self._loop.now() + failure.down_s, self._start, (failure.worker,))

    def drain(self, drain: Drain) -> None:
        node = self._nodes.get(drain.worker)
        if node is not None:
            node.is_draining = True
            self._pool.report(node)
            self._loop.at(self._loop.now() + drain.deadline_s, self._drained, drain.worker, node, True)

    def set_role(self, worker_id: str, role: Role, deadline_s: float, reason: str) -> None:
        node = next((node for node in self._nodes.values() if node.peer.worker_id == worker_id), None)
        if node is None or node.role is role:
            return
        self._account(node)
        self._metrics.count("pd_serve_role_switches_total", node.role.value, role.value, reason)
        node.role = role
        self._pool.report(node)
        self._loop.at(self._loop.now() + deadline_s, self._give_back, node, role)

    def account(self) -> None:
        """Up to now."""
        for node in self._nodes.values():
            self._account(node)

    # ---- inside

    def _start(self, places: range | tuple[int, ...]) -> None:
        nodes: list[Node] = []
        for place in places:
            group = self._groups[place]
            self._num_started[place] += 1
            peer = PeerId(WorkerId(f"{group.role.value}-{place}"), Incarnation(self._num_started[place]))
            node = Node(peer, group.role, group.model, self._spec.budget_of(group), self._settings, self._around)
            self._nodes[place] = self._around.nodes[peer] = node
            self._counted[peer] = self._loop.now(), 0.0
            nodes.append(node)
        self._pool.link(nodes)

    def _take_away(self, place: int, node: Node) -> None:
        self._account(node)
        node.die()
        del self._nodes[place], self._around.nodes[node.peer], self._counted[node.peer]
        self._pool.lose(node)

    def _give_back(self, node: Node, role: Role) -> None:
        if node.role is role and not node.is_dead:
            node.give_back(_LEAVING[role])

    def _drained(self, place: int, node: Node, is_deadline: bool) -> None:
        if node.is_dead:
            return
        if is_deadline:
            node.give_back(frozenset(Leg))
        if node.is_idle:
            self._take_away(place, node)
        else:
            self._loop.at(self._loop.now() + _LOOK_AGAIN_S, self._drained, place, node, False)

    def _account(self, node: Node) -> None:
        since, busy_s = self._counted[node.peer]
        now, busy_now = self._loop.now(), node.steps.busy_by_now()
        self._outcome.add_use(node.role.value, busy_now - busy_s, now - since)
        self._counted[node.peer] = now, busy_now
