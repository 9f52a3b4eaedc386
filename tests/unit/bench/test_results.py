"""Results and their machine: files that give them back, comparisons that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from pd_serve.bench.compare import compare_arms, compare_results
from pd_serve.bench.errors import BenchError
from pd_serve.bench.figures import shown
from pd_serve.bench.machine import MachineLoad, MachineWatch, differs
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.results import (
    ArmResult,
    Described,
    Result,
    diff_config,
    new_result,
    read_records,
    read_result,
    result_path,
    write_records,
    write_result,
)

QUIET = MachineLoad(2, 10.0, 1.5, 0.02, 0.1, 0.0, 2600.0, 0.5)
BUSY = msgspec.structs.replace(QUIET, others_cores=0.91)
STOLEN = msgspec.structs.replace(QUIET, steal_cores=0.4)


def result(load: MachineLoad = QUIET, itl: float = 0.02, threads: int = 1, kind: str = "load") -> Result:
    arms = {"ours": ArmResult({"itl_s.p50": itl, "failed": 0.0}), "theirs": ArmResult({"itl_s.p50": 2 * itl, "failed": 1.0})}
    config = {"ours/decode-0": {"engine.threads": threads, "kv.block_size": 16}, "theirs/decode-0": {"engine.threads": 2}}
    return new_result(Described(kind, "test", {"requests": 4}, config), load, arms)


def test_a_file_gives_the_result_back(tmp_path: Path) -> None:
    path = result_path(tmp_path / "new", "load", "a name/with more")
    assert path.name.startswith("load-a-name-with-more-")
    written = result()
    write_result(path, written)
    assert read_result(path) == written


def test_records_lie_beside_it(tmp_path: Path) -> None:
    records = [RequestRecord(1, "request", 0.0, 0.5, (1.0, 1.5), 3, 2, 200, "", "length")]
    path = tmp_path / "one.json"
    name = write_records(path, "ours rate=2", records)
    assert (tmp_path / name).is_file()
    assert read_records(path, ArmResult({}, name)) == records
    assert read_records(path, ArmResult({})) == []
    with pytest.raises(BenchError, match="cannot read"):
        read_records(path, ArmResult({}, "gone"))


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(BenchError, match="no result"):
        read_result(path)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(result(), schema=99)))
    with pytest.raises(BenchError, match="schema 99"):
        read_result(path)


def test_settings_that_differ_are_told() -> None:
    found = diff_config({"decode": {"a": 1, "b": 2}}, {"decode": {"a": 1, "b": 3}, "router": {"c": True}})
    assert [(one.process, one.key, one.a, one.b) for one in found] == [("decode", "b", 2, 3), ("router", "c", None, True)]


def test_two_results_become_ratios_and_differences() -> None:
    comparison = compare_results(result(), result(itl=0.03, threads=2))
    rows = {(row.arm, row.figure): row.ratio for row in comparison.rows}
    assert rows["ours", "itl_s.p50"] == pytest.approx(1.5)
    assert rows["ours", "failed"] == 1.0
    assert [(one.process, one.key, one.b) for one in comparison.differences] == [("ours/decode-0", "engine.threads", 2)]


def test_arms_of_one_run_are_compared_with_the_first() -> None:
    comparison = compare_arms(result())
    assert comparison.rows[0].arm == "ours : theirs"
    assert comparison.rows[0].ratio == pytest.approx(2.0)
    assert {one.key for one in comparison.differences} == {"engine.threads", "kv.block_size"}


@pytest.mark.parametrize("load", [BUSY, STOLEN])
def test_runs_under_another_load_are_not_compared_unless_forced(load: MachineLoad) -> None:
    with pytest.raises(BenchError, match=r"0\.02 cores"):
        compare_results(result(), result(load))
    assert compare_results(result(), result(load), force=True).rows
    assert compare_results(result(), result(load), limit_cores=1.0).rows


def test_other_kinds_and_other_arms_are_not_compared() -> None:
    with pytest.raises(BenchError, match="bench trace"):
        compare_results(result(), result(kind="trace"))
    renamed = msgspec.structs.replace(result(), arms={"third": ArmResult({})})
    with pytest.raises(BenchError, match="no arm is in both"):
        compare_results(result(), renamed)


def test_a_like_load_does_not_differ_and_another_machine_does() -> None:
    assert differs(QUIET, msgspec.structs.replace(QUIET, others_cores=0.11)) is None
    assert "2 cores, the other on 8" in str(differs(QUIET, msgspec.structs.replace(QUIET, cores=8)))


def test_a_watch_sees_what_this_process_used() -> None:
    """More than was spent in the block, less than the machine has: the counters tick in hundredths."""
    with MachineWatch() as watch:
        end = os.times().user + 0.05
        while os.times().user < end:
            pass
    assert watch.load.cores == os.cpu_count()
    assert watch.load.own_cores > 0
    assert watch.load.others_cores >= 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("itl_s.p99", 0.0123, "12.3 ms"),
        ("ttft_s.max", 1.8, "1,800 ms"),
        ("duration_s", 12.34, "12.3 s"),
        ("put_bytes_per_s", 5.25e9, "5.25 GB/s"),
        ("output_tokens_per_s", 180.44, "180.4 /s"),
        ("prefix_hit_rate", 0.366, "36.6%"),
        ("requests", 64.0, "64"),
    ],
)
def test_figures_are_written_in_their_unit(name: str, value: float, text: str) -> None:
    assert shown(name, value) == text
