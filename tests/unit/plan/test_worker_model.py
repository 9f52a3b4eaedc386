"""Step times by hand, the sums that must hold between them, and models as files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pd_serve.plan.errors import PlanError
from pd_serve.plan.worker_model import WorkerModel, drawn

MODEL = WorkerModel(
    name="a worker",
    num_gpus=1,
    prefill=(0.01, 1e-4, 1e-8),
    decode=(0.02, 1e-6, 1e-3),
    num_kv_tokens=10_000,
    kv_bytes_per_token=1024,
    num_layers=4,
    handover_s=0.002,
)


def test_a_prompt_takes_what_its_coefficients_say() -> None:
    assert MODEL.prefill_s([(100, 0)]) == pytest.approx(0.01 + 0.01 + 1e-4)
    assert MODEL.prefill_s([(100, 50), (10, 0)]) == pytest.approx(0.01 + 0.011 + 1e-8 * (100 * 200 + 100))
    assert MODEL.prefill_s([]) == 0.0


def test_chunks_of_a_prompt_add_up_to_the_whole_but_for_their_own_fixed_part() -> None:
    whole = MODEL.prefill_s([(1000, 0)])
    parts = MODEL.prefill_s([(300, 0)]) + MODEL.prefill_s([(300, 300)]) + MODEL.prefill_s([(400, 600)])
    assert parts - 2 * MODEL.prefill[0] == pytest.approx(whole)


def test_a_decode_step_takes_what_its_coefficients_say() -> None:
    assert MODEL.decode_s(4, 2000) == pytest.approx(0.02 + 0.002 + 0.004)
    assert MODEL.decode_s(0, 0) == 0.0


def test_a_run_of_steps_is_the_sum_of_its_steps() -> None:
    steps = sum(MODEL.decode_s(3, 500 + 3 * index) for index in range(40))
    assert MODEL.decode_run_s(3, 500, 40) == pytest.approx(steps)
    assert MODEL.decode_run_s(0, 0, 40) == 0.0


def test_a_step_that_does_both_pays_the_fixed_part_once() -> None:
    mixed = MODEL.mixed_s([(100, 0)], 4, 2000)
    assert mixed == pytest.approx(0.02 + 0.01 + 1e-4 + 0.002 + 0.004)
    assert MODEL.mixed_s([], 4, 2000) == MODEL.decode_s(4, 2000)
    assert MODEL.mixed_s([(100, 0)], 0, 0) == MODEL.prefill_s([(100, 0)])


def test_rows_that_go_into_calls_make_a_staircase() -> None:
    model = msgspec.structs.replace(MODEL, prefill_calls=(512, 256, 128, 64), prefill_call_s=0.005)
    assert model.prefill_s([(512, 0)]) == pytest.approx(0.01 + 0.005 + 1e-4 * 512 + 1e-8 * 512**2)
    assert model.prefill_s([(500, 0)]) == pytest.approx(0.01 + 4 * 0.005 + 1e-4 * 512 + 1e-8 * 500**2)
    assert model.prefill_s([(250, 0), (262, 0)]) == pytest.approx(0.01 + 0.005 + 1e-4 * 512 + 1e-8 * (250**2 + 262**2))
    assert model.mixed_s([(64, 0)], 1, 10) == pytest.approx(0.02 + 0.005 + 0.0064 + 1e-8 * 64**2 + 1e-5 + 1e-3)


def test_json_both_ways(tmp_path: Path) -> None:
    noisy = msgspec.structs.replace(MODEL, prefill_noise=(0.9, 1.0, 1.4), request_s=0.001)
    noisy.write(tmp_path / "models" / "prefill.json")
    assert WorkerModel.read(tmp_path / "models" / "prefill.json") == noisy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefill": [0.01, -1e-4, 0]}, "prefill"),
        ({"decode": [0, 0, 0]}, "not all 0"),
        ({"decode": [0, 0]}, "decode"),
        ({"num_kv_tokens": 0}, "num_kv_tokens is at least 1"),
        ({"handover_s": -1}, "handover_s"),
        ({"prefill_calls": [64, 128]}, "descending"),
        ({"prefill_noise": [1.2, 0.8]}, "ascending"),
        ({"colour": "red"}, "colour"),
        ({"num_layers": "4"}, "num_layers"),
    ],
)
def test_a_damaged_file_is_told_by_its_name_and_field(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "worker.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(MODEL) | change))
    with pytest.raises(PlanError, match=rf"worker\.json.*{words}"):
        WorkerModel.read(path)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        WorkerModel.read(tmp_path / "none.json")
    with pytest.raises(PlanError, match="is no JSON"):
        WorkerModel.from_json(b"prefill = 3", "x.toml")


def test_noise_is_drawn_between_its_quantiles() -> None:
    assert drawn((), 0.3) == 1.0
    assert [drawn((0.8, 1.0, 2.0), share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([0.8, 0.9, 1.0, 1.5, 2.0])
