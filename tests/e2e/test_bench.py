"""`pd-serve bench load` and its page on clusters that it starts itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pd_serve.bench.results import read_result
from pd_serve.cli.app import run
from pd_serve.plan.worker_model import WorkerModel

pytestmark = pytest.mark.slow


def test_two_clusters_are_measured_side_by_side_and_nothing_is_left(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    arms = ("--arm", "disaggregated=1p1d", "--arm", "colocated=1c")
    load = ("--concurrency", "2", "--requests", "4", "--input", "32", "--output", "8", "--rounds", "2")
    assert run(["bench", "load", *arms, *load, "--set", "kv.memory_bytes=67108864", "--out", str(out), "--json"]) == 0
    result = read_result(out)
    for arm in ("disaggregated", "colocated"):
        assert result.arms[arm].figures["requests"] == 4
        assert result.arms[arm].figures["failed"] == 0
        assert result.arms[arm].figures["prefix_hit_rate"] == 0
    assert set(result.config) == {"disaggregated/router", "disaggregated/prefill-0", "disaggregated/decode-0", "colocated/router"} | {
        "colocated/colocated-0"
    }
    assert result.config["colocated/colocated-0"]["kv.memory_bytes"] == 67108864
    assert run(["bench", "report", str(out)]) == 0
    assert out.with_suffix(".html").stat().st_size > 50_000
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_a_fit_writes_a_worker_model_for_each_role(tmp_path: Path) -> None:
    out = tmp_path / "fit.json"
    asked = (
        "--lengths",
        "33,64,100,200",
        "--contexts",
        "192,96,32",
        "--stairs",
        "4,2,1",
        "--steps",
        "8",
        "--repeats",
        "1",
        "--limit",
        "99",
    )
    assert run(["bench", "fit", "--arm", "ours=1p1d", "--set", "kv.memory_bytes=67108864", *asked, "--out", str(out), "--json"]) == 0
    figures = read_result(out).arms["ours"].figures
    assert figures["prefill_b_s"] > 0
    assert figures["decode_a_s"] > 0
    assert out.with_suffix(".fit.png").stat().st_size > 5_000
    for role in ("prefill", "decode"):
        model = WorkerModel.read(tmp_path / f"fit.{role}.json")
        assert (model.kv_bytes_per_token, model.num_layers, model.max_batch_tokens) == (23_040, 30, 512)
        assert model.num_kv_tokens == 16 * (67_108_864 // (16 * 23_040))
        assert model.decode_s(1, 64) > 0
        assert 0 < model.handover_s < 1
