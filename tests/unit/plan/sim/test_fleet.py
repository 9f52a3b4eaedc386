"""Whole simulations: against formulas where there are any, and everything that must be so whatever happens."""

from __future__ import annotations

import pytest

from pd_serve.bench.statistics import Slo
from pd_serve.plan.errors import PlanError
from pd_serve.plan.sim.fleet import FleetSpec, Group, LinkSpec, Simulation, simulate
from pd_serve.plan.workload import PlannedRequest
from pd_serve.protocol.link import Role
from tests.unit.plan.sim.fleets import FAST, MODEL, around, colocated, config_of, exactly, fleet, model_of, poisson, talks

PREFILL = (0.004, 5e-5, 1e-10)


def prompt_s(num_tokens: int) -> float:
    a, b, c = PREFILL
    return a + b * num_tokens + c * num_tokens**2


def test_one_request_takes_what_its_parts_take() -> None:
    """Prompt, last layer of KV, hand-over, and 9 steps that read one token more each."""
    outcome = simulate(fleet(1, 1), iter([PlannedRequest(2.0, 1000, 10)]))
    ttft_s = prompt_s(1000) + 1000 * MODEL.kv_bytes_per_token / FAST.bytes_per_s / MODEL.num_layers + MODEL.handover_s
    assert outcome.ttft.most == pytest.approx(ttft_s, rel=1e-9)
    steps_s = sum(0.006 + 2e-8 * (1001 + step) + 4e-5 for step in range(9))
    assert outcome.e2e.most == pytest.approx(ttft_s + steps_s, rel=1e-9)
    assert outcome.itl.count == 9


def test_without_overlap_the_whole_transfer_shows() -> None:
    spec = fleet(1, 1, link=LinkSpec(1e9, 0.001, is_layerwise=False))
    outcome = simulate(spec, iter([PlannedRequest(0.0, 1000, 1)]))
    assert outcome.ttft.most == pytest.approx(prompt_s(1000) + 0.001 + 1000 * MODEL.kv_bytes_per_token / 1e9 + MODEL.handover_s, rel=1e-9)


def test_long_prompts_are_computed_in_chunks_of_the_budget() -> None:
    outcome = simulate(colocated(1, chunk_budget=256), iter([PlannedRequest(0.0, 1000, 1)]))
    a, b, c = PREFILL
    assert outcome.ttft.most == pytest.approx(4 * a + b * 1000 + c * 1000**2, rel=1e-9)


def test_time_outside_of_steps_is_part_of_every_first_token() -> None:
    bare, slow = (
        simulate(fleet(1, 1, model_of(request_s=request_s)), iter([PlannedRequest(0.0, 100, 5)])).ttft.most for request_s in (0.0, 0.25)
    )
    assert slow - bare == pytest.approx(0.25)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_prefill_worker_is_a_queue_with_fixed_service(load: float) -> None:
    """M/D/1: the mean wait is rho D / (2 (1 - rho)). One prompt fills a step; KV weighs nothing."""
    model = model_of(kv_bytes_per_token=1, handover_s=0.0, max_batch_tokens=1000)
    service_s = prompt_s(1000)
    outcome = simulate(fleet(1, 1, model), poisson(load / service_s, 2000, exactly(1000), exactly(1), seed=3))
    expected = service_s + load * service_s / (2 * (1 - load))
    assert outcome.ttft.total / outcome.ttft.count == pytest.approx(expected, rel=0.1)


def test_nothing_is_lost_and_nothing_is_computed_twice() -> None:
    spec = fleet(2, 2, config=config_of(router={"policy": "least_ttft"}))
    simulation = Simulation(spec, talks(2.0, 60), Slo(), 0)
    outcome = simulation.run()
    requests = list(talks(2.0, 60))
    assert outcome.num_served == len(requests)
    assert outcome.num_prompt_tokens == sum(request.num_prompt for request in requests)
    assert outcome.num_output_tokens == sum(request.num_output for request in requests)
    assert outcome.itl.count == outcome.num_output_tokens - outcome.num_served
    computed = sum(node.steps.num_prompt_tokens for node in simulation.workers.nodes)
    assert computed == outcome.num_prompt_tokens - outcome.num_cached_tokens
    assert outcome.num_cached_tokens > 0.3 * outcome.num_prompt_tokens


def test_caches_that_nobody_asks_about_are_found_by_chance_only() -> None:
    hits = {}
    for policy in ("round_robin", "least_ttft"):
        spec = fleet(4, 2, config=config_of(router={"policy": policy}, routing={"session_header": ""}))
        hits[policy] = simulate(spec, talks(2.0, 60)).hit_rate
    assert hits["least_ttft"] > hits["round_robin"] + 0.2


def test_same_seed_same_outcome() -> None:
    model = model_of(prefill_noise=(0.9, 1.0, 1.3), decode_noise=(0.8, 1.0, 1.5))
    spec = fleet(2, 2, model, config=config_of(router={"policy": "power_of_two"}))
    first, second, other = (simulate(spec, poisson(20, 300, around(800), around(50)), Slo(1.0, 0.02), seed).to_json() for seed in (5, 5, 6))
    assert first == second != other


def test_measured_noise_spreads_steps() -> None:
    noisy = model_of(decode_noise=(0.5, 1.0, 1.5))
    plain, spread = (simulate(fleet(1, 1, model), poisson(5, 40, exactly(500), exactly(50))) for model in (MODEL, noisy))
    assert plain.itl.percentile(75) < 1.1 * plain.itl.percentile(25)
    assert spread.itl.percentile(75) > 1.4 * spread.itl.percentile(25)
    assert spread.itl.total / spread.itl.count == pytest.approx(plain.itl.total / plain.itl.count, rel=0.05)


def test_a_prompt_beside_streams_makes_them_pause() -> None:
    """The same two requests, on one worker and on a pair."""
    requests = [PlannedRequest(0.0, 100, 200), PlannedRequest(0.5, 2000, 10)]
    together, apart = simulate(colocated(1), iter(requests)), simulate(fleet(1, 1), iter(requests))
    assert together.itl.most == pytest.approx(prompt_s(2000) + 2e-8 * 180 + 4e-5 + 0.002, abs=0.003)
    assert apart.itl.most < 0.015
    in_chunks = simulate(colocated(1, chunk_budget=256), iter(requests))
    assert in_chunks.itl.most < 0.3 * together.itl.most


def test_requests_that_would_be_late_are_turned_away_by_the_router_itself() -> None:
    spec = fleet(1, 1, config=config_of(router={"slo_ttft_ms": 500.0, "max_queued_requests": 10_000, "max_open_requests": 100_000}))
    requests = list(poisson(60, 400, exactly(1000), exactly(20)))
    outcome = simulate(spec, iter(requests), Slo(ttft_s=0.5))
    assert outcome.rejections["predicted_ttft"] > 100
    assert outcome.num_met > 0.8 * outcome.num_served
    assert outcome.num_served + outcome.num_rejected == 400
    without = fleet(1, 1, config=config_of(router={"max_queued_requests": 10_000, "max_open_requests": 100_000}))
    assert simulate(without, iter(requests), Slo(ttft_s=0.5)).num_met < 0.5 * outcome.num_met


def test_use_is_the_share_of_time_in_steps() -> None:
    outcome = simulate(fleet(1, 1), poisson(10, 500, exactly(1000), exactly(1)))
    assert outcome.utilization("prefill") == pytest.approx(10 * prompt_s(1000), rel=0.1)
    assert outcome.utilization("decode") == 0.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (FleetSpec((Group(Role.PREFILL, 1, MODEL),), FAST), "decodes"),
        (FleetSpec((Group(Role.DECODE, 0, MODEL), Group(Role.BOTH, 1, MODEL)), FAST), "at least one worker"),
        (FleetSpec((Group(Role.BOTH, 1, MODEL),), LinkSpec(0.0)), "rate above 0"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(spec: FleetSpec, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        simulate(spec, poisson(1, 1, exactly(1), exactly(1)))


def test_blocks_of_two_lengths_are_refused() -> None:
    requests = [PlannedRequest(0.0, 100, 1, (1, 2), 64), PlannedRequest(0.1, 100, 1, (1, 2), 32)]
    with pytest.raises(PlanError, match="blocks of 64 and of 32"):
        simulate(fleet(1, 1), iter(requests))
