"""Pictures are drawn of what there is, and their lack of a library is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pd_serve.bench.errors import BenchError
from pd_serve.bench.statistics import Slo
from pd_serve.plan.candidates import colocated, disaggregated
from pd_serve.plan.curve import Curve, Trial
from pd_serve.plan.errors import PlanError
from pd_serve.plan.pictures import curve_pictures, load_pictures, write_pictures
from pd_serve.plan.worker_model import WorkerModel

PNG = b"\x89PNG\r\n"


def worker(num_gpus: int = 1) -> WorkerModel:
    return WorkerModel(
        name="toy",
        num_gpus=num_gpus,
        prefill=(0.0, 1e-4, 0.0),
        decode=(0.01, 0.0, 0.0),
        num_kv_tokens=1000,
        kv_bytes_per_token=1,
        num_layers=1,
        handover_s=0.0,
    )


TRIALS = (Trial(1.0, 1.0), Trial(2.0, 0.93), Trial(4.0, 0.4))
CURVES = [
    *(Curve(disaggregated(x, 4 - x, worker(), worker()), TRIALS) for x in (1, 2, 3)),
    Curve(colocated(4, worker(), 512), TRIALS),
]


def test_a_search_is_drawn_as_curves_and_as_a_map_of_splits() -> None:
    drawn = curve_pictures(CURVES)
    assert drawn.keys() == {"goodput", "splits"}
    assert all(data.startswith(PNG) for data in drawn.values())


def test_each_pair_of_degrees_has_a_map_of_its_own() -> None:
    mixed = [Curve(disaggregated(x, 1, worker(1), worker(2)), TRIALS) for x in (1, 2)]
    assert curve_pictures([*CURVES, *mixed]).keys() == {"goodput", "splits", "splits-tp1-2"}


def test_a_load_is_drawn_as_far_as_it_was_watched() -> None:
    tail = ((0.1, 1.0), (0.2, 0.5), (0.9, 0.01))
    watched = Trial(1.0, 1.0, series={"ttft": tail, "itl": tail, "use.prefill": ((0.0, 0.5), (1.0, 0.9)), "queue.router": ((0.0, 3.0),)})
    assert load_pictures({"1P1D": watched, "2C": watched}, Slo(0.5, 0.05)).keys() == {"ttft", "itl", "use", "queue"}
    assert load_pictures({"1P1D": Trial(1.0, 1.0, series={"ttft": tail})}, Slo()).keys() == {"ttft"}
    assert load_pictures({"1P1D": Trial(1.0, 1.0)}, Slo()) == {}


def test_pictures_are_files_by_their_names(tmp_path: Path) -> None:
    assert [path.read_bytes() for path in write_pictures({"a": b"1", "b": b"2"}, tmp_path / "new")] == [b"1", b"2"]
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="cannot write"):
        write_pictures({"a": b"1"}, tmp_path / "file")


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchError, match=r"pip install 'pd-serve\[bench\]'"):
        curve_pictures(CURVES)
