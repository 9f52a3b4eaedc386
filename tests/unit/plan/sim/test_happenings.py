"""What happens besides work: deaths, drains, full pools, changed roles. Every run checks that nothing is left open (SimulationError)."""

from __future__ import annotations

import pytest

from pd_serve.bench.statistics import Slo
from pd_serve.plan.outcome import Outcome
from pd_serve.plan.sim.fleet import Drain, Failure, FleetSpec, Group, Look, Retries, Simulation, SimulationError, simulate
from pd_serve.plan.sim.node import Node
from pd_serve.plan.sim.prompts import Attempt
from pd_serve.plan.workload import PlannedRequest
from pd_serve.protocol.link import Role
from tests.unit.plan.sim.fleets import FAST, MODEL, around, colocated, config_of, exactly, fleet, model_of, poisson, talks


def run(spec: FleetSpec, requests: list[PlannedRequest]) -> tuple[Outcome, Simulation]:
    simulation = Simulation(spec, iter(requests), Slo(), 0)
    return simulation.run(), simulation


@pytest.mark.parametrize("worker", [0, 1, 2, 3])
def test_a_worker_that_dies_loses_no_request(worker: int) -> None:
    requests = list(poisson(25, 250, around(900), around(80)))
    failures = tuple(Failure(at_s, worker, 0.5) for at_s in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0))
    outcome, simulation = run(fleet(2, 2, failures=failures), requests)
    assert (outcome.num_served, outcome.num_failed) == (250, 0)
    assert outcome.num_output_tokens == sum(request.num_output for request in requests)
    assert outcome.itl.count == outcome.num_output_tokens - 250, "no token was sent twice"
    moves = simulation.router.metrics.sums["pd_serve_moves_total", "peer_lost"]
    assert moves > 0
    assert len(simulation.workers.nodes) == 4


def test_its_streams_pause_while_their_context_is_computed_again() -> None:
    requests = [PlannedRequest(0.0, 1000, 500)]
    outcome, _ = run(fleet(1, 2, failures=(Failure(1.0, 1), Failure(1.0, 2, 0.5))), requests)
    assert outcome.num_served == 1
    assert 0.5 < outcome.itl.most < 0.7, "until one is back, prompt and tokens so far, and the hand-over"


def test_without_any_worker_left_requests_fail_in_time() -> None:
    spec = fleet(1, 1, config=config_of(router={"queue_timeout_s": 3.0}), failures=(Failure(0.5, 1),))
    outcome, _ = run(spec, list(poisson(10, 20, exactly(500), exactly(100))))
    assert outcome.num_failed > 10
    assert outcome.num_served + outcome.num_failed == 20


def test_a_cache_that_died_is_empty() -> None:
    config = config_of(router={"policy": "least_ttft"})
    whole, _ = run(fleet(1, 1, config=config), list(talks(1.0, 30)))
    broken, _ = run(fleet(1, 1, config=config, failures=tuple(Failure(at_s, 0, 0.1) for at_s in range(1, 40, 2))), list(talks(1.0, 30)))
    assert broken.num_served == whole.num_served
    assert broken.hit_rate < whole.hit_rate - 0.1


def test_a_drained_worker_leaves_and_its_work_is_moved_at_the_deadline() -> None:
    requests = list(poisson(10, 200, around(500), around(300)))
    outcome, simulation = run(fleet(1, 2, failures=(Drain(5.0, 1, 0.2),)), requests)
    assert outcome.num_served == 200
    assert simulation.router.metrics.sums["pd_serve_moves_total", "draining"] > 0
    assert [node.peer.worker_id for node in simulation.workers.nodes] == ["prefill-0", "decode-2"]


def test_a_full_pool_preempts_the_youngest_and_all_are_answered() -> None:
    """Room for about ten, of which each grows to three times its prompt."""
    config = config_of(kv={"headroom_tokens": 1}, router={"queue_timeout_s": 600.0})
    outcome, simulation = run(fleet(1, 2, model_of(num_kv_tokens=6000), config=config), list(poisson(40, 50, exactly(400), exactly(800))))
    assert outcome.num_served == 50
    assert simulation.router.metrics.sums["pd_serve_moves_total", "preempted"] > 5
    assert outcome.itl.count == 50 * 799


def test_headroom_keeps_it_from_filling_up() -> None:
    config = config_of(kv={"headroom_tokens": 800})
    _, simulation = run(fleet(1, 2, model_of(num_kv_tokens=6000), config=config), list(poisson(40, 50, exactly(400), exactly(800))))
    assert not simulation.router.metrics.sums["pd_serve_moves_total", "preempted"]


def test_roles_follow_a_load_that_shifts() -> None:
    """Long prompts with short answers, on a fleet made for the opposite."""
    requests = list(poisson(12, 400, around(3000), around(20)))
    times = {"interval_s": 0.5, "hold_s": 1.0, "min_dwell_s": 3.0, "deadline_s": 5.0}
    still = fleet(1, 5, config=config_of(router={"queue_timeout_s": 600.0}))
    moving = fleet(1, 5, config=config_of(router={"queue_timeout_s": 600.0}, roles={"auto": True, **times}))
    (fixed, _), (switched, simulation) = run(still, requests), run(moving, requests)
    assert switched.num_served == fixed.num_served == 400
    assert sum(node.role is Role.PREFILL for node in simulation.workers.nodes) > 1
    assert switched.ttft.percentile(50) < 0.5 * fixed.ttft.percentile(50)
    assert simulation.router.metrics.sums["pd_serve_role_switches_total", "decode", "prefill", "queue"] >= 1


def test_work_of_the_old_role_is_given_back_at_the_deadline() -> None:
    simulation = Simulation(fleet(1, 2), iter(poisson(20, 100, exactly(300), exactly(400))), Slo(), 0)
    simulation.loop.at(1.0, simulation.workers.set_role, "decode-1", Role.PREFILL, 0.1, "admin")
    outcome = simulation.run()
    assert outcome.num_served == 100
    assert simulation.router.metrics.sums["pd_serve_moves_total", "draining"] > 0
    assert outcome.roles["prefill"].present_s > outcome.duration_s * 1.5


def test_clients_that_come_again_are_served_later() -> None:
    config = config_of(router={"max_queued_requests": 5})
    requests = list(poisson(60, 200, exactly(1000), exactly(5)))
    once, patient = (simulate(fleet(1, 1, config=config, retries=Retries(number)), iter(requests)) for number in (0, 50))
    assert once.rejections["queue_full"] > 20
    assert patient.num_rejected == 0
    assert patient.num_served == 200
    assert patient.ttft.percentile(90) > 1.0, "the wait outside counts"


def test_tenants_share_by_the_routers_fairness() -> None:
    flood = [request._replace(key="loud") for request in poisson(200, 400, exactly(1000), exactly(5))]
    few = [request._replace(key="quiet") for request in poisson(2, 20, exactly(1000), exactly(5), seed=1)]
    spec = fleet(1, 1, config=config_of(router={"max_queued_requests": 10_000, "queue_timeout_s": 600.0}))
    simulation = Simulation(spec, iter(sorted(flood + few)), Slo(ttft_s=0.5), 0)
    outcome = simulation.run()
    assert outcome.num_met >= 20, "every one of the quiet tenant's, and the first of the other's"


def test_colocated_and_prefill_and_decode_together() -> None:
    spec = FleetSpec((Group(Role.PREFILL, 1, MODEL), Group(Role.DECODE, 1, MODEL), Group(Role.BOTH, 1, MODEL)), FAST)
    outcome, simulation = run(spec, list(poisson(15, 200, around(500), around(50))))
    assert outcome.num_served == 200
    assert set(outcome.roles) == {"prefill", "decode", "both"}
    assert {labels[1] for labels in simulation.router.metrics.sums if labels[0] == "pd_serve_routing_decisions_total"} >= {"disaggregated"}


def test_short_prompts_are_computed_where_they_decode() -> None:
    config = config_of(router={"local_prefill_max_tokens": 256})
    outcome, simulation = run(fleet(1, 1, config=config), list(poisson(10, 100, exactly(200), exactly(20))))
    assert outcome.num_served == 100
    assert simulation.router.metrics.sums["pd_serve_routing_decisions_total", "local", "short_prompt"] == 100
    assert outcome.utilization("prefill") == 0


def test_watch_looks_every_second() -> None:
    looks: list[Look] = []
    simulate(colocated(2), poisson(10, 100, exactly(500), exactly(50)), watch=looks.append)
    assert [look.at_s for look in looks] == pytest.approx([float(second) for second in range(1, len(looks) + 1)])
    assert 0 < max(look.roles["both"].busy_share for look in looks) <= 1.001


def test_memory_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a prefill worker keeps what it has sent."""

    def leaks(self: Node, attempt: Attempt) -> None:
        attempt.holding.num_own = 0
        original(self, attempt)

    original = Node.has_left
    monkeypatch.setattr(Node, "has_left", leaks)
    with pytest.raises(SimulationError, match="holds"):
        simulate(fleet(1, 1), poisson(10, 10, exactly(500), exactly(5)))


def test_a_request_that_is_never_answered_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the record of a hand-over gets lost, and no router's timer is asked."""
    monkeypatch.setattr(Node, "filled", lambda self, attempt_id, num_cached: None)
    spec = fleet(1, 1, config=config_of(router={"max_moves": 0}))
    assert simulate(spec, poisson(10, 10, exactly(500), exactly(5))).num_failed == 10
