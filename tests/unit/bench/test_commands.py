"""`pd-serve bench load, trace, compare, report` as a user types them, against a server that answers at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pd_serve.bench.pictures import pictures
from pd_serve.bench.results import ArmResult, Described, new_result, read_result
from pd_serve.cli.app import run
from tests.ports import free_port
from tests.unit.bench.openai_stub import Stub, serving
from tests.unit.bench.test_results import QUIET
from tests.unit.bench.test_trace import MOONCAKE

SHORT = ("--requests", "6", "--input", "8", "--output", "4", "--warmup", "1")


def bench(*arguments: object) -> int:
    return run(["bench", *map(str, arguments)])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert bench(*arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", ["load", "trace", "compare", "report"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert bench(command, "--help") == 0
    text = capsys.readouterr().out
    assert "Example" in text
    assert f"pd-serve bench {command}" in text


def test_arms_are_sent_the_same_requests_in_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.json"
    with serving(Stub()) as a, serving(Stub(num_cached=4)) as b:
        arms = ("--arm", f"a={a.url}", "--arm", f"b={b.url}/v1/")
        assert bench("load", *arms, *SHORT, "--concurrency", "2", "--rounds", "3", "--out", out, "--json") == 0
    assert a.bodies == b.bodies
    assert len(a.bodies) == 7
    result = read_result(out)
    assert json.loads(capsys.readouterr().out)["arms"].keys() == result.arms.keys() == {"a", "b"}
    assert result.arms["a"].figures["requests"] == 6
    assert result.arms["a"].figures["failed"] == 0
    assert "prefix_hit_rate" in result.arms["b"].figures
    assert bench("compare", out) == 0
    assert "a : b" in capsys.readouterr().out


def test_a_sweep_tells_what_each_rate_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    with serving(Stub()) as stub:
        assert bench("load", "--url", stub.url, *SHORT, "--rate", "500,1000", "--slo-ttft-ms", "1000", "--out", out) == 0
    result = read_result(out)
    assert list(result.arms) == ["endpoint rate=500", "endpoint rate=1000"]
    assert len({str(body["prompt"]) for body in stub.bodies}) == len(stub.bodies) == 13
    assert result.arms["endpoint rate=500"].figures["slo_attainment"] == 1.0
    assert "99% up to" in result.notes[0]
    assert "rate=1000" in capsys.readouterr().out


def test_a_result_becomes_a_page_with_its_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.json"
    with serving(Stub()) as stub:
        assert bench("load", "--url", stub.url, *SHORT, "--out", out, "--json") == 0
    capsys.readouterr()
    assert bench("report", out) == 0
    page, *drawn = map(Path, capsys.readouterr().out.split())
    text = page.read_text()
    assert [path.name for path in drawn] == ["load.ttft.png", "load.itl.png", "load.timeline.png"]
    assert text.count("data:image/png;base64,") == len(drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert "tpot_s.p999" in text


def test_rates_of_a_sweep_become_a_curve(tmp_path: Path) -> None:
    arms = {
        f"a rate={rate}": ArmResult({"offered_requests_per_s": rate, "ttft_s.p99": 0.1 * rate}, "", {"arm": "a"}) for rate in (1.0, 2.0)
    }
    result = new_result(Described("load", "", {}), QUIET, arms)
    assert list(pictures(tmp_path / "sweep.json", result)) == ["over-rate-ttft_s"]


def test_saved_plans_are_sent_again(tmp_path: Path) -> None:
    plans = tmp_path / "plans.jsonl"
    with serving(Stub()) as stub:
        assert bench("load", "--url", stub.url, *SHORT, "--save-plans", plans, "--out", tmp_path / "1.json", "--json") == 0
        first = list(stub.bodies)
        stub.bodies.clear()
        assert bench("load", "--url", stub.url, "--plans", plans, "--warmup", "0", "--out", tmp_path / "2.json", "--json") == 0
    assert {str(body["prompt"]) for body in stub.bodies} == {str(body["prompt"]) for body in first[1:]}


def test_a_trace_is_replayed_with_its_hit_rate(tmp_path: Path) -> None:
    trace, out = tmp_path / "mooncake.jsonl", tmp_path / "trace.json"
    trace.write_text(MOONCAKE)
    with serving(Stub(num_cached=10)) as stub:
        scaled = ("--limit", "2", "--block-tokens", "8", "--max-output", "2", "--speed-up", "100", "--warmup", "0")
        assert bench("trace", trace, "--url", stub.url, *scaled, "--out", out, "--json") == 0
    assert [len(body["prompt"]) for body in stub.bodies] == [20, 17]  # type: ignore[arg-type]
    result = read_result(out)
    assert result.parameters["ideal_prefix_hit_rate"] == pytest.approx(16 / 37)
    assert 0 < result.arms["endpoint"].figures["prefix_hit_rate"] < 1
    assert result.arms["endpoint"].figures["rejected_share"] == 0


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert nobody in error_of(capsys, "load", "--url", nobody)
    assert "nothing to measure" in error_of(capsys, "load")
    assert "--arm x" in error_of(capsys, "load", "--arm", "x")
    assert "--rate fast" in error_of(capsys, "load", "--url", nobody, "--rate", "fast")
    assert "no length" in error_of(capsys, "load", "--url", nobody, "--input", "-3")
    assert "/no/such" in error_of(capsys, "load", "--url", nobody, "--plans", "/no/such")
    assert "/no/such" in error_of(capsys, "trace", "/no/such", "--url", nobody)
    assert "/no/such" in error_of(capsys, "compare", "/no/such.json", "/no/such.json")
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json" in error_of(capsys, "report", tmp_path / "bad.json")
    with serving(Stub(status=503, error="not ready")) as stub:
        assert "not ready" in error_of(capsys, "load", "--url", stub.url, *SHORT, "--out", tmp_path / "none.json")
