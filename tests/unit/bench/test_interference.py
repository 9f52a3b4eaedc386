"""The interference run around its arms: cores, settings, the sweep's file, notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.bench.cores import CoreShare, share_cores
from pd_serve.bench.errors import BenchError
from pd_serve.bench.interference import InterferenceSettings, _config_notes, best_of_sweep, run_interference
from pd_serve.bench.interference_turns import in_sequence, mean_load
from pd_serve.bench.machine import MachineLoad
from pd_serve.bench.progress import Bars
from pd_serve.bench.records import RequestRecord
from pd_serve.bench.results import ArmResult, Described, new_result, write_result
from pd_serve.bench.victims import VICTIM, Round, VictimsTest, Window
from pd_serve.cli.app import run

LOAD = MachineLoad(2, 10.0, 1.0, 0.1, 0.3, 0.0, 0.0, 0.5)


def test_both_arms_have_the_same_cores_and_threads_in_all() -> None:
    settings = InterferenceSettings(VictimsTest(), CoreShare((0, 2), (1, 3)))
    apart, together = settings.disaggregated().settings, settings.colocated(128).settings
    assert (apart["prefill.engine.cpu_affinity"], apart["decode.engine.cpu_affinity"]) == ("0,2", "1,3")
    assert (apart["prefill.engine.threads"], apart["decode.engine.threads"]) == ("2", "2")
    assert (together["colocated.engine.cpu_affinity"], together["colocated.engine.threads"]) == ("0,2,1,3", "4")
    assert together["colocated.engine.max_batch_tokens"] == "128"
    assert apart["kv.prefix_cache"] == together["kv.prefix_cache"] == "false"


def test_more_cores_than_there_are_cannot_be_shared_out() -> None:
    with pytest.raises(BenchError, match="need 20000 in all"):
        share_cores(10_000)


def test_rounds_become_one_sequence_of_records() -> None:
    one = RequestRecord(0, VICTIM, 0.0, 1.0, (2.0, 3.0), 4, 2, 200, "", "length")
    window = Window(2.0, 10.0)
    assert [record.token_s for record in in_sequence([Round((one,), window), Round((one,), window)])] == [(2.0, 3.0), (12.0, 13.0)]


def test_loads_are_averaged_by_their_time() -> None:
    load = mean_load([LOAD, MachineLoad(2, 30.0, 2.0, 0.5, 0.6, 0.2, 0.0, 0.5)])
    assert (load.duration_s, load.others_cores_max) == (40.0, 0.6)
    assert load.others_cores == pytest.approx(0.4)
    assert load.steal_cores == pytest.approx(0.15)


def test_settings_that_differ_are_named_but_for_those_that_tell_the_arms_apart() -> None:
    config = {
        "a/router": {"router.policy": "x"},
        "b/router": {"router.policy": "y"},
        "a/colocated-0": {"worker.id": "colocated-0", "kv.block_size": 16, "engine.threads": 2},
        "b/decode-0": {"worker.id": "decode-0", "kv.block_size": 32, "engine.threads": 1},
    }
    assert _config_notes(config) == ["settings differ: kv.block_size: a/colocated-0 16, b/decode-0 32"]


def test_the_best_budget_is_read_from_the_sweep() -> None:
    figures = {"itl_s.p999": 0.1, "long_ttft_s.p50": 1.0, "victim_tokens_per_s": 100.0}
    arms = {f"budget-{n}": ArmResult({**figures, "itl_s.p999": n / 1e3}, parameters={"budget": n}) for n in (512, 128, 256)}
    assert best_of_sweep(arms) == 128


async def test_a_run_without_a_sweep_says_how_to_make_one(tmp_path: Path) -> None:
    settings = InterferenceSettings(VictimsTest(), None)
    with Bars(quiet=True) as bars, pytest.raises(BenchError, match="--sweep"):
        await run_interference(settings, tmp_path / "sweep.json", tmp_path / "out.json", bars)


async def test_another_result_is_not_taken_for_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    write_result(path, new_result(Described("load", "", {}), LOAD, {}))
    with Bars(quiet=True) as bars, pytest.raises(BenchError, match="not a sweep"):
        await run_interference(InterferenceSettings(VictimsTest(), None), path, tmp_path / "out.json", bars)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("interference", "--sweep", "some"), "expected numbers"),
        (("interference", "--cores-per-role", "10000"), "need 20000 in all"),
        (("interference", "--no-clusters", "--arm", "ours=nonsense"), "neither a URL nor a cluster"),
        (("interference", "--no-clusters"), "nothing to measure"),
        (("interference", "--set", "kv.block_size"), "expected KEY=VALUE"),
        (("handover", "--lengths", "0"), "above 0"),
        (("handover", "--requests", "200"), "does not remember more"),
    ],
)
def test_wrong_options_are_told_in_one_line(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *arguments]) in (1, 2)
    told = capsys.readouterr().err
    assert words in told
    assert len(told.strip().splitlines()) == 1
