"""A trial is a run of the simulator with what the scenario says: its load, its link, its settings, its failures."""

from __future__ import annotations

import msgspec
import pytest

from pd_serve.bench.statistics import Slo
from pd_serve.config import Config
from pd_serve.plan.candidates import Candidate, colocated, disaggregated
from pd_serve.plan.errors import PlanError
from pd_serve.plan.load import Load
from pd_serve.plan.scenario import Outage, Scenario, Wire
from pd_serve.plan.trials import Trials
from pd_serve.plan.worker_model import WorkerModel

MODEL = WorkerModel(
    name="toy",
    num_gpus=1,
    prefill=(0.0, 1e-4, 0.0),
    decode=(0.01, 0.0, 0.0),
    num_kv_tokens=100_000,
    kv_bytes_per_token=10_000,
    num_layers=4,
    handover_s=0.001,
)
SPLIT = disaggregated(1, 2, MODEL, MODEL)
SCENARIO = Scenario(Load(limit=40, input="1000", output="50"), Slo(0.5, 0.05), Wire(1e9), Config().model_dump_json())


def changed(**fields: object) -> Trials:
    return Trials(msgspec.structs.replace(SCENARIO, **fields))


def test_a_trial_has_the_figures_of_its_run() -> None:
    trial = changed().evaluate(SPLIT, 2.0)
    assert (trial.rate, trial.num_requests, trial.attainment, trial.rejected, trial.series) == (2.0, 40, 1.0, {}, {})
    assert trial.figures["itl_s.p50"] == pytest.approx(0.01, rel=0.05)
    assert trial.figures["ttft_s.p50"] > 0.1


def test_the_same_trial_is_the_same_again() -> None:
    assert changed().evaluate(SPLIT, 5.0) == changed().evaluate(SPLIT, 5.0)


def test_a_slow_link_is_waited_for() -> None:
    slow = changed(wire=Wire(2e7)).evaluate(SPLIT, 0.5)
    assert slow.figures["ttft_s.p50"] > 0.4 > changed().evaluate(SPLIT, 0.5).figures["ttft_s.p50"]


def test_a_look_has_curves_and_is_told_how_far_it_is() -> None:
    shares: list[float] = []
    trial = changed().look(SPLIT, 4.0, 2.0, shares.append)
    assert trial.num_requests == 80
    assert shares[-1] == 1.0
    assert {"ttft", "itl", "queue.router", "use.prefill", "use.decode"} <= trial.series.keys()
    assert trial.series["ttft"][0][1] == 1.0


def test_settings_of_the_router_are_its_own() -> None:
    config = Config.model_validate({"router": {"slo_ttft_ms": 150}})
    turned_away = changed(config=config.model_dump_json(), load=Load(limit=200, input="1000", output="50")).evaluate(SPLIT, 40.0)
    assert sum(turned_away.rejected.values()) > 0
    assert turned_away.figures["ttft_s.p50"] < changed().evaluate(SPLIT, 40.0).figures["ttft_s.p50"]


def test_a_worker_that_dies_is_missed() -> None:
    whole = changed(load=Load(limit=100, input="1000", output="50")).evaluate(colocated(2, MODEL, 512), 4.0)
    broken = changed(load=Load(limit=100, input="1000", output="50"), outages=(Outage("decode", 0, 5.0, 15.0),))
    assert broken.evaluate(colocated(2, MODEL, 512), 4.0).figures["ttft_s.p99"] > whole.figures["ttft_s.p99"]


@pytest.mark.parametrize(("fleet", "outage"), [(SPLIT, Outage("decode", 2, 1.0, 1.0)), (SPLIT, Outage("colocated", 0, 1.0, 1.0))])
def test_a_failure_of_nobody_is_told(fleet: Candidate, outage: Outage) -> None:
    with pytest.raises(PlanError, match="that could fail"):
        changed(outages=(outage,)).evaluate(fleet, 1.0)
