"""What a trace asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.plan.errors import PlanError
from pd_serve.plan.trace_demand import read_trace_demand


def mooncake(path: Path, moments_s: list[float]) -> Path:
    lines = [
        {"timestamp": 1000 * moment, "input_length": 1000 + 2 * index, "output_length": 10, "hash_ids": [1, 2 + index]}
        for index, moment in enumerate(moments_s)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_rates_are_of_the_whole_and_of_the_busiest_minute(tmp_path: Path) -> None:
    quiet, busy = [0.0, 60.0, 120.0, 180.0], [200.0 + second for second in range(30)]
    found = read_trace_demand(mooncake(tmp_path / "x.jsonl", [*quiet, *busy, 400.0]))
    assert found.num_requests == 35
    assert found.requests_per_s == pytest.approx(34 / 400)
    assert found.peak_requests_per_s == pytest.approx(31 / 60), "the burst, and the one 20 s before it"
    assert (found.prompt_tokens, found.output_tokens) == (1034, 10)
    assert found.ideal_hit_rate == pytest.approx(34 * 512 / (35 * 1034))


def test_a_trace_sped_up_is_as_much_busier(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "x.jsonl", [float(second) for second in range(241)])
    found = read_trace_demand(path, speed_up=2.0)
    assert (found.seconds, found.requests_per_s) == (120, 2)
    assert found.peak_requests_per_s == 2


def test_a_short_trace_has_no_busier_minute(tmp_path: Path) -> None:
    found = read_trace_demand(mooncake(tmp_path / "x.jsonl", [0.0, 1.0, 2.0]))
    assert found.peak_requests_per_s == found.requests_per_s == 1


def test_what_has_no_rate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="at one moment"):
        read_trace_demand(mooncake(tmp_path / "x.jsonl", [5.0]))
    with pytest.raises(PlanError, match="speed-up 0"):
        read_trace_demand(tmp_path / "x.jsonl", speed_up=0)
    with pytest.raises(BenchError, match="cannot read"):
        read_trace_demand(tmp_path / "none.jsonl")
