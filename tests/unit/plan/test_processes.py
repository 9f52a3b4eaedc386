"""Curves come in the order of their tasks, from as many processes as were asked for, and a process that fails is told of."""

from __future__ import annotations

import sys

import pytest

from pd_serve.bench.statistics import Slo
from pd_serve.config import Config
from pd_serve.plan.candidates import colocated
from pd_serve.plan.curve import Curve
from pd_serve.plan.errors import PlanError
from pd_serve.plan.load import Load
from pd_serve.plan.processes import CurveProcesses
from pd_serve.plan.scenario import Outage, Scenario, Wire
from pd_serve.plan.search import CurveTask
from pd_serve.plan.worker_model import WorkerModel

SCENARIO = Scenario(Load(limit=1), Slo(0.5, 0.05), Wire(1e9), Config().model_dump_json())
ECHO = """
import json, sys
json.loads(sys.stdin.readline())["slo"]
for line in sys.stdin:
    task = json.loads(line)
    print(json.dumps({"candidate": task["candidate"], "trials": [{"rate": task["start"], "attainment": 1.0}]}), flush=True)
"""
FAILING = "import sys; sys.stdin.readline(); sys.stdin.readline(); sys.exit('no such trace')"


def tasks(count: int) -> list[CurveTask]:
    model = WorkerModel(
        name="toy",
        num_gpus=1,
        prefill=(0.0, 1e-4, 0.0),
        decode=(0.01, 0.0, 0.0),
        num_kv_tokens=1000,
        kv_bytes_per_token=1,
        num_layers=1,
        handover_s=0.0,
    )
    return [CurveTask(colocated(number, model), float(number)) for number in range(1, count + 1)]


def test_curves_come_in_the_order_of_their_tasks() -> None:
    done: list[Curve] = []
    with CurveProcesses(SCENARIO, 2, done.append, (sys.executable, "-S", "-c", ECHO)) as processes:
        curves = list(processes.run(tasks(5)))
        again = list(processes.run(tasks(1)))
    assert [curve.trials[0].rate for curve in curves] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [curve.candidate for curve in curves] == [task.candidate for task in tasks(5)]
    assert again == curves[:1]
    assert len(done) == 6


def test_a_process_that_fails_ends_the_search_with_its_last_words() -> None:
    with (
        CurveProcesses(SCENARIO, 1, lambda _: None, (sys.executable, "-S", "-c", FAILING)) as processes,
        pytest.raises(PlanError, match="ended with 1: no such trace"),
    ):
        list(processes.run(tasks(3)))


def test_leaving_with_work_under_way_leaves_no_process() -> None:
    with CurveProcesses(SCENARIO, 2, lambda _: None, (sys.executable, "-S", "-c", "import sys; sys.stdin.read()")) as processes:
        processes.run(tasks(6))
        started = list(processes._processes)
    assert all(process.returncode is not None for process in started)


def test_settings_and_failures_go_along() -> None:
    assert SCENARIO.router_config() == Config()
    assert Outage.parse("decode-0@60+30") == Outage("decode", 0, 60.0, 30.0)
    with pytest.raises(PlanError, match="decode-0@60"):
        Outage.parse("decode@60")
