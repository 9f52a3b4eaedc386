"""Measured against predicted, on measurements that were made by hand from the very costs that the models have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.machine import MachineLoad
from pd_serve.bench.records import RequestPlan, RequestRecord
from pd_serve.bench.results import ArmResult, Config, Described, new_result, write_records, write_result
from pd_serve.bench.workload import write_plans
from pd_serve.cli.app import run
from pd_serve.plan.errors import PlanError
from pd_serve.plan.validation import FIGURES, Predicted, block_keys, read_fitted, read_measured, requests_of, validate
from pd_serve.plan.worker_model import WorkerModel
from pd_serve.protocol.link import Role

LOAD = MachineLoad(2, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
MODEL = WorkerModel(
    name="by hand",
    num_gpus=1,
    prefill=(0.05, 3e-4, 0.0),
    decode=(0.03, 0.0, 0.0),
    num_kv_tokens=20_000,
    kv_bytes_per_token=1000,
    num_layers=4,
    max_batch_tokens=512,
    handover_s=0.004,
    request_s=0.01,
)
CONFIG: Config = {
    "ours/router": {"router.policy": "least_tokens", "router.workers": "", "kv.block_size": 16, "kv.prefix_cache": True},
    "ours/prefill-0": {"engine.threads": 1},
    "ours/decode-0": {"engine.threads": 1},
}


def alone(index: int, num_prompt: int, num_output: int) -> RequestRecord:
    """One request that meets no other."""
    sent_s = 10.0 * index
    first_s = sent_s + 0.01 + 0.05 + 3e-4 * num_prompt + 0.004
    token_s = tuple(first_s + 0.03 * place for place in range(num_output))
    return RequestRecord(index, "request", sent_s, sent_s, token_s, num_prompt, num_output, 200, "", "length", 0)


def result_of(
    path: Path, records: list[RequestRecord], kind: str = "load", config: dict[str, dict[str, str | int | float | bool]] = CONFIG
) -> Path:
    arm = ArmResult({}, write_records(path, "ours", records), {"arm": "ours"})
    write_result(path, new_result(Described(kind, "x", {}, config), LOAD, {"ours": arm}))
    return path


def fit_of(path: Path) -> Path:
    write_result(path, new_result(Described("fit", "x", {}), LOAD, {"ours": ArmResult({"bandwidth_bytes_per_s": 1e9})}))
    for role in ("prefill", "decode"):
        MODEL.write(path.with_name(f"{path.stem}.{role}.json"))
    return path


def test_requests_that_meet_no_other_are_predicted_to_the_millisecond(tmp_path: Path) -> None:
    records = [alone(index, 100 + 20 * index, 8) for index in range(12)]
    (measured,) = read_measured(result_of(tmp_path / "load.json", records))
    assert measured.groups == ((Role.PREFILL, 1), (Role.DECODE, 1))
    found = validate(measured, read_fitted(fit_of(tmp_path / "fit.json")), num_seeds=2)
    assert [each.figure for each in found] == list(FIGURES)
    for each in found:
        assert each.error == pytest.approx(0.0, abs=0.02), each
        assert each.is_within
        assert each.low <= each.predicted <= each.high


def test_a_wrong_model_misses(tmp_path: Path) -> None:
    fit = fit_of(tmp_path / "fit.json")
    slower = msgspec.structs.replace(MODEL, prefill=(0.2, 6e-4, 0.0))
    slower.write(tmp_path / "fit.prefill.json")
    (measured,) = read_measured(result_of(tmp_path / "load.json", [alone(index, 200, 8) for index in range(4)]))
    missed = {each.figure for each in validate(measured, read_fitted(fit), num_seeds=1) if not each.is_within}
    assert missed == {"ttft_s.p50", "ttft_s.p99"}


def test_prompts_that_share_a_head_are_predicted_to_find_it(tmp_path: Path) -> None:
    prompts = [tuple(range(300, 700)) + tuple(range(1000 * index, 1000 * index + 16)) for index in (1, 2, 3, 4)]
    plans = [RequestPlan(index, "request", 0.0, prompt, 8) for index, prompt in enumerate(prompts)]
    records = [alone(index, 416 if index == 0 else 16, 8) for index in range(4)]
    records = [msgspec.structs.replace(record, num_prompt_tokens=416) for record in records]
    (measured,) = read_measured(result_of(tmp_path / "load.json", records))
    fitted = read_fitted(fit_of(tmp_path / "fit.json"))
    knowing, unknowing = validate(measured, fitted, plans, 1), validate(measured, fitted, (), 1)
    assert knowing[0].is_within
    assert not unknowing[0].is_within


def test_keys_are_equal_as_long_as_prompts_are() -> None:
    one, other = tuple(range(40)), (*range(20), 99, *range(21, 40))
    assert len(block_keys(one, 16)) == 2
    assert block_keys(one, 16)[0] == block_keys(other, 16)[0]
    assert block_keys(one, 16)[1] != block_keys(other, 16)[1]
    assert block_keys("some text", 16) == ()


def test_requests_come_as_they_were_sent() -> None:
    records = [msgspec.structs.replace(alone(0, 20, 4), sent_s=3.0), alone(0, 10, 5)]
    assert [(request.at_s, request.num_prompt, request.num_output) for request in requests_of(records, (), 16)] == [
        (0.0, 10, 5),
        (3.0, 20, 4),
    ]


def test_the_command_tells_each_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, fit = result_of(tmp_path / "load.json", [alone(index, 200, 8) for index in range(4)]), fit_of(tmp_path / "fit.json")
    plans = tmp_path / "plans.jsonl"
    write_plans(plans, [RequestPlan(0, "request", 0.0, (1, 2), 8)])
    assert run(["plan", "validate", str(load), "--fit", str(fit), "--plans", str(plans), "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 within 20 %" in shown
    assert "ttft_s.p99" in shown
    assert run(["plan", "validate", str(load), "--fit", str(fit), "--seeds", "1", "--json"]) == 0
    assert len(msgspec.json.decode(capsys.readouterr().out, type=list[Predicted])) == 4


def test_what_cannot_be_compared_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load, fit = result_of(tmp_path / "load.json", [alone(0, 200, 8)]), fit_of(tmp_path / "fit.json")
    with pytest.raises(PlanError, match="not of bench fit"):
        read_fitted(load)
    with pytest.raises(PlanError, match="expected one of load or trace"):
        list(read_measured(fit))
    with pytest.raises(BenchError, match="cannot read"):
        read_fitted(tmp_path / "none.json")
    bare = result_of(tmp_path / "url.json", [alone(0, 200, 8)], config={})
    with pytest.raises(PlanError, match="does not say which workers"):
        list(read_measured(bare))
    (tmp_path / "fit.decode.json").unlink()
    (measured,) = read_measured(load)
    with pytest.raises(PlanError, match="had decode workers"):
        validate(measured, read_fitted(fit))
    assert run(["plan", "validate", str(load), "--fit", str(fit), "--plans", "a", "--plans", "b"]) != 0
    assert "1 results and 2 plans" in capsys.readouterr().err
