"""The role controller over simulated traffic: it follows, it does not flap, and one worker of each role is always left."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from pd_serve.config import RolesConfig
from pd_serve.observe import Metrics, Side
from pd_serve.protocol.link import Role
from router.role_loop import Attainment
from router.roles import Look, RoleController, Switch, WorkerUse
from tests.fakes import peer_id

SETTINGS = RolesConfig(auto=True)
P, D = Role.PREFILL, Role.DECODE


def worker(name: str, role: Role, use: float = 0.0, num_tokens: int = 0) -> WorkerUse:
    return WorkerUse(peer_id(name), role, use if role is P else 0.0, use if role is D else 0.0, num_tokens)


def decided(controller: RoleController, look: Look, seconds: int, start: int = 0) -> list[tuple[int, Switch]]:
    made = ((now, controller.decide(look, float(now))) for now in range(start, start + seconds))
    return [(now, switch) for now, switch in made if switch is not None]


QUEUE = Look((worker("p0", P, 1.0), worker("d0", D, 0.3, 900), worker("d1", D, 0.2, 500)), num_queued=9)


def test_a_long_queue_takes_the_least_loaded_decode_worker_after_a_while() -> None:
    ((now, switch),) = decided(RoleController(SETTINGS), QUEUE, 20)
    assert (now, switch) == (5, Switch(peer_id("d1"), P, "queue"))


def test_full_pools_take_a_prefill_worker_back() -> None:
    full = Look((worker("p0", P, 0.1, 50), worker("p1", P, 0.1, 20), worker("d0", D, 0.95)), num_queued=30)
    assert decided(RoleController(SETTINGS), full, 20) == [(5, Switch(peer_id("p1"), D, "kv"))]


@pytest.mark.parametrize(
    ("ttft", "itl", "expected"),
    [(0.5, None, ("d1", P, "ttft")), (0.99, 0.5, ("p0", D, "itl")), (0.5, 0.5, None), (0.95, 0.95, None), (None, None, None)],
)
def test_objectives_that_are_missed_count_as_short(ttft: float | None, itl: float | None, expected: tuple[str, Role, str] | None) -> None:
    calm = Look((worker("p0", P), worker("p1", P, num_tokens=5), worker("d0", D, 0.3, 9), worker("d1", D, 0.2, 5)), 0, ttft, itl)
    made = decided(RoleController(SETTINGS), calm, 20)
    assert [(switch.peer.worker_id, switch.role, switch.reason) for _, switch in made] == ([expected] if expected else [])


def test_the_last_of_a_role_stays_however_short_the_other_is() -> None:
    one_each = Look((worker("p0", P, 1.0), worker("d0", D, 0.0)), num_queued=1000, ttft_attainment=0.0)
    assert decided(RoleController(SETTINGS), one_each, 200) == []
    full = Look((worker("p0", P, 0.0), worker("d0", D, 1.0), worker("b0", Role.BOTH)), num_queued=0, itl_attainment=0.0)
    assert decided(RoleController(SETTINGS), full, 200) == []


def test_what_is_needed_only_now_and_then_is_not_done() -> None:
    controller = RoleController(SETTINGS)
    calm = Look(QUEUE.workers, num_queued=0)
    for now in range(300):
        assert controller.decide(calm if now % 4 == 3 else QUEUE, float(now)) is None


def test_a_worker_that_the_rest_could_not_do_without_is_not_spared() -> None:
    tight = Look((worker("p0", P, 1.0), worker("d0", D, 0.45), worker("d1", D, 0.45)), num_queued=9)
    assert decided(RoleController(SETTINGS), tight, 60) == []


def test_any_change_of_the_fleet_is_given_time_to_settle() -> None:
    controller = RoleController(SETTINGS)
    before = Look((worker("p0", P), *QUEUE.workers[1:]), num_queued=0)
    decided(controller, before, 3)
    joined = Look((*QUEUE.workers, worker("d2", D, 0.2, 700)), num_queued=9)
    ((now, _),) = decided(controller, joined, 40, start=3)
    assert now == 3 + 30


def test_attainment_is_of_the_last_while_and_unknown_without_an_objective() -> None:
    metrics = Metrics(CollectorRegistry(), Side.ROUTER)
    ttft = metrics.histogram("pd_serve_time_to_first_token_seconds")
    attainment = Attainment(ttft, 0.5, window_s=10.0)
    assert attainment.now(0.0) is None
    for value in (0.1, 0.4, 0.6, 3.0):
        ttft.observe(value)
    assert attainment.now(1.0) == 0.5
    ttft.observe(0.2)
    assert attainment.now(9.0) == 0.6
    assert attainment.now(12.0) == 1.0
    assert attainment.now(30.0) is None
    assert Attainment(ttft, 0.0, window_s=10.0).now(1.0) is None


@dataclass
class Cluster:
    """Requests come in, wait for a prefill worker, then hold room on decode workers for a while. A worker prefills 4 a second, or has room
    for 100."""

    rng: Random
    roles: dict[str, Role]
    num_queued: float = 0.0
    running: list[tuple[float, float]] = field(default_factory=list)

    def count(self, role: Role) -> int:
        return sum(each is role for each in self.roles.values())

    def second(self, now: float, arrivals: float, decode_s: float) -> Look:
        self.num_queued += max(0.0, self.rng.gauss(arrivals, 1.0))
        self.running = [entry for entry in self.running if entry[0] > now]
        room = 100.0 * self.count(D) - sum(amount for _, amount in self.running)
        started = max(0.0, min(self.num_queued, 4.0 * self.count(P), room))
        self.num_queued -= started
        self.running.append((now + decode_s, started))
        decode_use = min(1.0, sum(amount for _, amount in self.running) / (100.0 * self.count(D)))
        prefill_use = min(1.0, started / (4.0 * self.count(P)))
        return Look(
            tuple(worker(name, role, prefill_use if role is P else decode_use) for name, role in self.roles.items()), int(self.num_queued)
        )


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_swings_of_traffic_and_does_not_flap(seed: int) -> None:
    """Ten minutes each: long prompts with short answers, then the opposite, then prompts again."""
    cluster = Cluster(Random(seed), {"w0": P, "w1": D, "w2": D, "w3": D})
    controller = RoleController(SETTINGS)
    switched_at: list[float] = []
    seen: list[int] = []
    for phase, (arrivals, decode_s) in enumerate(((9.0, 5.0), (3.0, 60.0), (9.0, 5.0))):
        for second in range(600):
            now = 600.0 * phase + second
            switch = controller.decide(cluster.second(now, arrivals, decode_s), now)
            if switch is not None:
                switched_at.append(now)
                cluster.roles[switch.peer.worker_id] = switch.role
            assert cluster.count(P) >= 1
            assert cluster.count(D) >= 1
        seen.append(cluster.count(P))
        assert cluster.num_queued < 20, (phase, cluster.roles)
    assert seen[0] == 3
    assert seen[1] == 1
    assert seen[2] == 3
    assert len(switched_at) == 6, switched_at
    assert all(later - earlier >= SETTINGS.min_dwell_s for earlier, later in pairwise(switched_at))


def test_steady_traffic_near_a_threshold_changes_nothing_for_an_hour() -> None:
    cluster = Cluster(Random(7), {"w0": P, "w1": P, "w2": D, "w3": D})
    controller = RoleController(SETTINGS)
    switches = [now for now in range(3600) if controller.decide(cluster.second(float(now), 7.0, 20.0), float(now)) is not None]
    assert len(switches) <= 1, switches
