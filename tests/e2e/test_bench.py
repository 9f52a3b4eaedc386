"""`pd-serve bench load` and its page on clusters that it starts itself."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pd_serve.bench.results import read_result
from pd_serve.cli.app import run

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
