"""A load keeps the rate it is asked for, whatever it is made of, and tells what its requests want."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pd_serve.plan.errors import PlanError
from pd_serve.plan.load import Burst, Load


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A request every half second; every prompt begins with the same block."""
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * n, "input_length": 1024, "output_length": 10, "hash_ids": [0, n + 1]} for n in range(41)]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    return path


@pytest.mark.parametrize(
    "load",
    [
        Load(limit=4000),
        Load(limit=4000, burst=Burst(4.0, 20.0, 2.0)),
        Load(limit=4000, turns=5, think_s=1.0),
    ],
)
def test_a_synthetic_load_has_the_mean_rate_it_is_asked_for(load: Load) -> None:
    times = [request.at_s for request in load.requests(8.0, seed=3)]
    assert len(times) == 4000 == load.num_requests()
    assert len(times) / times[-1] == pytest.approx(8.0, rel=0.12)


def test_a_trace_is_sped_up_to_the_rate(trace: Path) -> None:
    load = Load(trace=str(trace))
    assert load.natural_rate() == pytest.approx(2.0)
    times = [request.at_s for request in load.requests(20.0, seed=0)]
    assert (len(times), times[-1]) == (41, pytest.approx(2.0))
    assert len(list(Load(trace=str(trace), minutes=1 / 6).requests(2.0, 0))) == 20


def test_what_an_endless_cache_holds_is_not_counted_as_uncached(trace: Path) -> None:
    shape = Load(trace=str(trace)).shape(2.0, 0)
    assert (shape.num_prompt, shape.num_output) == (1024, 10)
    assert shape.num_uncached == pytest.approx((1024 + 40 * 512) / 41)
    assert Load(limit=100, input="300", output="20").shape(1.0, 0).num_uncached == 300


def test_the_same_seed_gives_the_same_requests() -> None:
    load = Load(limit=50, input="100-900")
    assert list(load.requests(3.0, 1)) == list(load.requests(3.0, 1)) != list(load.requests(3.0, 2))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(), "number of requests"),
        (Load(limit=9, input="long"), "no length"),
        (Load(limit=9, turns=3, burst=Burst(2.0, 9.0, 1.0)), "not both"),
        (Load(trace="x", turns=3), "a trace has its own"),
    ],
)
def test_a_load_that_makes_no_sense_is_told(load: Load, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        load.check()


@pytest.mark.parametrize("text", ["4", "4:60", "x:60:5", "4:5:60", "0.5:60:5"])
def test_a_burst_that_makes_no_sense_is_told(text: str) -> None:
    with pytest.raises(PlanError, match="expected"):
        Burst.parse(text)


def test_a_load_goes_to_another_process_and_comes_back() -> None:
    load = Load(limit=9, burst=Burst.parse("4:60:5"))
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load
