"""One simulated run: a cluster, clients and faults, all drawn from one seed; run to its end, checked all the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from pd_serve.engine.scheduler import SchedulerSettings
from pd_serve.ids import AttemptId, Incarnation, LinkId, PeerId, WorkerId
from pd_serve.protocol.link import PeerInfo, Role
from pd_serve.protocol.sampling import SamplingParams
from router.lifecycle import Lifecycle, LifecycleSettings
from tests.sim.core import Loop, ViolationError
from tests.sim.fabric import Fabric
from tests.sim.links import Link
from tests.sim.model import EOS, VOCAB_SIZE, make_layout
from tests.sim.node import Node, NodeSettings
from tests.sim.router import Request, SimRouter, make_request
from tests.sim.scenario import draw_scenario
from workers.events import DrainRequested
from workers.machine import WorkerMachine
from workers.settings import MachineSettings, pool_limited_len

NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Planted:
    """Which machines run: the real ones, or a broken one."""

    machine: type[WorkerMachine] = WorkerMachine
    lifecycle: type[Lifecycle] = Lifecycle
    scenario: Mapping[str, object] = field(default_factory=dict)
    """Fields of Scenario that every run has as told here, for what only one kind of run can find."""


@dataclass(slots=True)
class Report:
    """What a run was like, to see that the simulator visits what it should."""

    seed: int
    virtual_s: float
    num_events: int
    counts: Counter[str]


class World:
    patience_s = 90.0
    """Virtual seconds after the last fault in which everything must have ended."""

    def __init__(self, seed: int, planted: Planted = Planted(), is_verbose: bool = False) -> None:
        self.seed = seed
        self.loop = Loop(seed, is_verbose)
        self.rng = self.loop.rng
        self.planted = planted
        self.scenario = replace(draw_scenario(self.rng, seed), **planted.scenario)  # type: ignore[arg-type]
        self.fabric = Fabric(self.loop, self.scenario.fabric, self.scenario.lanes)
        self.nodes: dict[WorkerId, Node] = {}
        """Newest incarnation of each worker."""
        self.all_nodes: list[Node] = []
        self.routers: list[SimRouter] = []
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self._by_attempt: dict[AttemptId, Request] = {}
        self._next_link_id = 1
        self._last_fault_at = 0.0
        self._more = Random(f"{seed} more")
        """For what was added later, so that the rest of a seed's run is as it was."""
        self._handover_timeout_s = self._more.choice((NEVER_S, 2.0, 0.05, 0.003) if self.scenario.num_faults else (NEVER_S, 2.0))
        self._num_ranks = Random(f"{seed} ranks").choice((1, 1, 2))  # of every worker; the routes of a lease write the same bytes

    # ---- building

    def build(self) -> None:
        scenario = self.scenario
        roles = [Role.PREFILL] * scenario.num_prefill + [Role.DECODE] * scenario.num_decode + [Role.BOTH] * scenario.num_both
        for number in range(scenario.num_routers):
            self._start_router(f"router{number}")
        for number, role in enumerate(roles):
            name = WorkerId(f"{role.value[0]}{number}")
            self.loop.at(self.rng.uniform(0, 0.01), partial(self.start_node, name, role))
        for number in range(scenario.num_requests):
            self._plan_request(number)
        for _ in range(scenario.num_faults):
            self.loop.at(self.rng.uniform(0.0, scenario.duration_s + 0.05), self._fault)

    def _start_router(self, name: str) -> None:
        settings = LifecycleSettings(self.scenario.transfer_timeout_s, self._handover_timeout_s, self.scenario.max_moves)
        router = SimRouter(self.loop, name, settings, self.planted.lifecycle)
        router.local_share = self.scenario.local_share
        router.register_attempt = self._by_attempt.__setitem__
        self.routers.append(router)
        for node in self.nodes.values():
            self._link_later(router, node, 0.02)

    def start_node(self, worker_id: WorkerId, role: Role) -> None:
        scenario, rng = self.scenario, self.rng
        num_blocks = rng.randint(*scenario.pool_tokens) // scenario.block_size
        layout = make_layout(scenario.num_layers, scenario.block_size, num_blocks)
        peer, ranks = PeerId(worker_id, Incarnation(rng.getrandbits(20))), (b"",) * self._num_ranks
        info = PeerInfo(peer, role, 1, "model", layout, "sim", ranks, len(ranks) * layout.num_kv_heads)
        max_len = pool_limited_len(layout, 4096)
        machine = MachineSettings(
            info=info,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_len,
            max_waiting=rng.choice((2, 100)),
            headroom_tokens=rng.choice((0, 2, 8)),
            quarantine_retry_s=0.1,
            quarantine_fence_share=rng.choice((0.3, 1.0)),
            hard_fence_after_s=2.0,
            rejoin_after_s=0.2,
            load_interval_s=0.5,
            heartbeat_s=5.0,
        )
        scheduler = SchedulerSettings(
            max_batch_tokens=rng.choice((4, 16, 64)),
            max_running=rng.choice((2, 8)),
            prefill_chunk=rng.choice((0, 3)),
            eos_token_ids=frozenset({EOS}),
            max_model_len=max_len,
        )
        layer_s = rng.choice((0.0002, 0.001))
        settings = NodeSettings(machine, scheduler, self.planted.machine, layer_s, scenario.engine_faults, scenario.transport_stall)
        node = Node(self.loop, worker_id, settings, self.fabric, self._tokens_of)
        node.on_crash = self._on_crash
        self.nodes[worker_id] = node
        self.all_nodes.append(node)
        for router in self.routers:
            self._link_later(router, node, 0.01)

    def _tokens_of(self, attempt_id: int) -> tuple[int, ...]:
        return self._by_attempt[AttemptId(attempt_id)].final_tokens

    def _plan_request(self, number: int) -> None:
        rng = self.rng
        base = tuple(Random(rng.randrange(3)).choices(range(1, VOCAB_SIZE), k=24))
        longest = self.scenario.pool_tokens[0] - self.scenario.block_size
        length = rng.randint(1, longest - 1)
        shared = rng.choice((0, rng.randint(0, length)))
        prompt = (base[:shared] + tuple(rng.choices(range(1, VOCAB_SIZE), k=length)))[:length]
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, longest - length))) if longest - length > 1 else 1,
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.choice(((), (7, 8))),
            ignore_eos=rng.random() < 0.3,
            num_logprobs=rng.choice((-1, 0)),
        )
        request = make_request(number, prompt, sampling)
        self.requests.append(request)
        arrival = rng.uniform(0.0, self.scenario.duration_s)
        self.loop.at(arrival, lambda: self._submit(request))
        if rng.random() < self.scenario.cancel_share:
            self.loop.at(arrival + rng.expovariate(1 / 0.02), lambda: self._cancel(request))

    def _submit(self, request: Request) -> None:
        alive = [router for router in self.routers if not router.is_dead]
        if not alive:
            self.loop.after(0.01, lambda: self._submit(request))
            return
        self.rng.choice(alive).submit(request)

    def _cancel(self, request: Request) -> None:
        for router in self.routers:
            if request in router.open:
                router.cancel(request)

    # ---- links

    def _link_later(self, router: SimRouter, node: Node, within_s: float) -> None:
        self.loop.after(self.rng.uniform(0.0, within_s), lambda: self._link(router, node))

    def _link(self, router: SimRouter, node: Node) -> None:
        if router.is_dead or node.is_dead or self.nodes[node.info.peer.worker_id] is not node or node.peer in router.links:
            return
        if node.is_stopped or router.is_stopped:
            self._link_later(router, node, 0.1)
            return
        link = Link(router, node, LinkId(self._next_link_id), self.scenario.spike)
        self._next_link_id += 1
        link.open()
        router.on_link(link)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Reconnect when the link has ended for both; the router gives up a silent worker."""

        def look() -> None:
            if link.router.is_dead or link.node.is_dead:
                link.cut()
                return
            if link.router_knows_end and link.node_knows_end:
                self._link(link.router, link.node)
                return
            if link.is_alive and link.node.is_stopped and self.rng.random() < 0.3:
                link.cut()
            self.loop.after(0.1, look)

        self.loop.after(0.1, look)

    # ---- faults

    def _fault(self) -> None:
        if not self.nodes:
            return
        self._last_fault_at = self.loop.now
        kinds = (
            self._crash_node,
            self._stop_node,
            self._cut_link,
            self._cut_connection,
            self._crash_router,
            self._drain_node,
            self._usurp_node,
        )
        self.rng.choices(kinds, weights=(4, 5, 3, 3, 1, 2, 1))[0]()

    def _some_node(self) -> Node:
        return self.rng.choice([self.nodes[name] for name in sorted(self.nodes)])

    def _crash_node(self) -> None:
        """Every other time another one dies at the same moment: of the other role, or of the same."""
        self.counts["crash"] += 1
        node = self._some_node()
        node.crash()
        others = [other for _, other in sorted(self.nodes.items()) if not other.is_dead]
        if others and self._more.random() < 0.5:
            other = self._more.choice(others)
            kinds = sorted((node.info.role.value, other.info.role.value))
            self.counts[f"crash of {' and '.join(kinds)}"] += 1
            other.crash()

    def _on_crash(self, node: Node) -> None:
        self._last_fault_at = self.loop.now
        for link in list(node.links.values()):
            link.cut()
        if self.nodes[node.info.peer.worker_id] is node:
            self.loop.after(self.rng.uniform(0.01, 1.0), lambda: self._restart(node))

    def _restart(self, node: Node) -> None:
        worker_id = node.info.peer.worker_id
        if self.nodes[worker_id] is node:
            self.start_node(worker_id, node.info.role)

    def _stop_node(self) -> None:
        node = self._some_node()
        self.counts["stop"] += 1
        node.stop()
        pause = self.rng.choice((0.005, 0.05, 0.5, 5.0))
        self.loop.after(self.rng.uniform(0, pause), lambda: self._resume(node))

    def _resume(self, node: Node) -> None:
        self._last_fault_at = self.loop.now
        node.resume()

    def _cut_link(self) -> None:
        links = [link for router in self.routers for link in router.links.values()]
        if links:
            self.counts["cut link"] += 1
            self.rng.choice(links).cut()

    def _cut_connection(self) -> None:
        connections = self.fabric.connections()
        if connections:
            self.counts["cut connection"] += 1
            self.fabric.cut(self.rng.choice(connections))

    def _crash_router(self) -> None:
        router = self.rng.choice(self.routers)
        if not router.is_dead:
            self.counts["crash router"] += 1
            router.crash()
            self.loop.after(self.rng.uniform(0.01, 0.2), lambda: self._start_router(f"{router.name}'"))

    def _drain_node(self) -> None:
        node = self._some_node()
        self.counts["drain"] += 1
        node.call(lambda: node.post(DrainRequested(self.rng.choice((0.0, 0.01, 0.1)))))
        self.loop.after(0.5, lambda: self._end_drained(node))

    def _end_drained(self, node: Node) -> None:
        """A drained worker exits once it holds nothing, and is started anew."""
        if node.is_dead:
            return
        if node.is_stopped or not node.machine.is_idle:
            self.loop.after(0.1, lambda: self._end_drained(node))
            return
        node.crash()

    def _usurp_node(self) -> None:
        """Somebody starts a worker of the same name while the old process is merely stopped; later the old one wakes up."""
        node = self._some_node()
        self.counts["usurp"] += 1
        node.stop()
        for link in list(node.links.values()):
            link.cut()
        self.loop.after(0.1, lambda: self._restart(node))
        self.loop.after(self.rng.uniform(0.2, 6.0), lambda: self._resume(node))

    # ---- running

    def run(self) -> Report:
        self.build()
        while not self._is_over():
            if self.loop.now > self._last_fault_at + self.patience_s:
                raise ViolationError(f"no end after {self.loop.now:.0f} virtual seconds: {self._open_ends()}")
            self.loop.run_until(self.loop.now + 0.25)
        for node in self._alive_nodes():
            node.check_drained()
        for request in self.requests:
            self._check_request(request)
            self.counts["moves"] += max(0, request.num_assignments - 1)
        self.counts["handover timeouts"] = sum(router.num_handover_timeouts for router in self.routers)
        return Report(self.seed, self.loop.now, self.loop.num_events, self.counts)

    def _alive_nodes(self) -> list[Node]:
        return [node for node in self.all_nodes if not node.is_dead]

    def _is_over(self) -> bool:
        if not all(request.is_over for request in self.requests):
            return False
        return all(not node.is_stopped and node.machine.is_idle and not node.windows for node in self._alive_nodes())

    def _open_ends(self) -> str:
        ends = [f"request {request.number} ({len(request.received)} tokens)" for request in self.requests if not request.is_over]
        for node in self._alive_nodes():
            if not node.machine.is_idle or node.windows:
                ends.append(f"{node.name}: {node.machine.load()} leases {node.machine.leases_by_state()} jobs {len(node.machine.prefill)}")
        return "; ".join(ends)

    def _check_request(self, request: Request) -> None:
        ends = {"cancelled": request.is_cancelled, "orphaned": request.is_orphaned, "finished": request.finish is not None}
        self.counts[next((name for name, is_so in ends.items() if is_so), "failed")] += 1
        if request.finish is not None and (tuple(request.received), request.finish) != (request.answer.tokens, request.answer.finish):
            raise ViolationError(f"request {request.number} got {request.received} {request.finish}, not {request.answer}")
        if request.error is not None:
            raise ViolationError(f"request {request.number} failed although it could be served: {request.error!r}")


def run_seed(seed: int, planted: Planted = Planted(), is_verbose: bool = False) -> Report:
    """Raises ViolationError (or whatever a machine raised) with the command that replays it in a note."""
    world = World(seed, planted, is_verbose)
    try:
        return world.run()
    except Exception as error:
        error.add_note(f"at {world.loop.now * 1000:.3f} virtual ms; replay: python -m tests.sim --seed {seed}")
        raise
