"""`pd-serve plan` as a command: its output for people and for scripts, its errors."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pd_serve.cli.app import run
from pd_serve.cli.plan import plan
from pd_serve.plan.hardware import link
from pd_serve.plan.picture import ratio_picture

TABLE = "cost Llama-3.1-70B --params 70e9 --prefill-tp 4 --tflops 400 --link 100,200,400 --no-attention --setup-ms 0 --prompts 2048,8192"


def plan_run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(["plan", *shlex.split(line)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_the_published_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan_run(TABLE, capsys)
    assert code == 0
    for figure in ("320 KiB in bf16, 160 KiB in fp8", "165,120 B", "179 ms", "54 ms (30%)", "2.68 GB", "107 ms (15%)", "(2 copies)"):
        assert figure in out
    assert "the ratio is the same at every length" in out


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan_run(f"{TABLE} --json", capsys)
    report = json.loads(out)
    assert code == 0
    assert report["token_bytes"]["bfloat16"] == 327_680
    assert [round(1e3 * each["wire_s"]) for each in report["prompts"][1]["hand_overs"]] == [215, 107, 54]
    assert [each["chunk"] for each in report["pauses"]] == [0, 2048, 512]
    assert len(report["verdicts"]) == 3


def test_windows_and_latents_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan_run("cost gemma-3-27b-it --gpu H100", capsys)
    assert "52 of 62 layers see the last 1,024 tokens only" in out
    _, out, _ = plan_run("cost DeepSeek-V3 --gpu H200 --utilisation 0.4 --prefill-tp 8 --itl-slo-ms 20", capsys)
    assert "61 layers x one latent of 576" in out
    assert "(8 copies)" in out
    assert "37.6B of them for a token" in out


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ratio.png"
    code, out, _ = plan_run(f"{TABLE} --plot {path}", capsys)
    assert code == 0
    assert str(path) in out
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = plan_run(f"{TABLE} --plot {tmp_path / 'x.png'}", capsys)
    assert code == 1
    assert "pip install 'pd-serve[bench]'" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cost nothing --tflops 400", "no model 'nothing'"),
        ("cost demo", "give one of --tflops, --gpu, --prefill-tokens-per-s"),
        ("cost demo --tflops 4 --gpu H100", "give one of"),
        ("cost demo --gpu H1", "no figures for a GPU 'H1'"),
        ("cost demo --gpu H100 --utilisation 2", "--utilisation 2"),
        ("cost demo --tflops 4 --link warp", "'warp' is no link"),
        ("cost demo --tflops 4 --kv-dtype int4", "--kv-dtype int4"),
        ("cost demo --tflops 4 --prompts a,b", "--prompts a,b"),
        ("cost demo --tflops 4 --decode-tp 2", "cannot be shared out to 2 ranks"),
        ("cost demo --tflops 4 --plot /nowhere/x.png", "cannot write /nowhere/x.png"),
        ("ratio --input 100 --output 0 --prefill-tokens-per-s 10 --decode-tokens-per-s 10", "give --input and --output"),
        ("ratio --input 100 --output 10 --decode-tokens-per-s 10", "give --prefill-tokens-per-s, or --measure URL"),
        ("ratio --measure http://127.0.0.1:1", "cannot reach http://127.0.0.1:1"),
        ("ratio --trace /nowhere.csv --prefill-tokens-per-s 10", "cannot read /nowhere.csv"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = plan_run(line, capsys)
    assert (code, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


def test_ratio_tells_counts_with_and_without_head_room(capsys: pytest.CaptureFixture[str]) -> None:
    line = "ratio --rate 30 --input 2000 --output 300 --prefill-tokens-per-s 20000 --decode-tokens-per-s 3000"
    code, out, _ = plan_run(line, capsys)
    assert code == 0
    assert "3P3D" in out
    assert "4P4D" in out
    _, out, _ = plan_run(f"{line} --json", capsys)
    report = json.loads(out)
    assert report["ratio"] == 1
    assert [each["utilisation"] for each in report["needs"]] == [1.0, 0.8]
    assert [(each["num_prefill"], each["num_decode"]) for each in report["needs"]] == [(3, 3), (4, 4)]


def test_the_picture_needs_no_length_beyond_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    from pd_serve.plan.cost import Setting, Speed
    from pd_serve.plan.models import model_shape

    assert ratio_picture(Setting(shape=model_shape("demo"), speed=Speed(tokens_per_s=1000)), [link("shm")]).startswith(b"\x89PNG")


def test_help_teaches_with_examples_and_loads_nothing_heavy() -> None:
    assert plan.info.name == "plan"
    script = "import sys\nfrom pd_serve.cli.app import run\nrun(['plan', 'cost', '--help'])\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pd-serve plan cost Llama-3.1-70B" in done.stdout
    loaded = done.stderr.split()
    assert not {"torch", "httpx", "numpy", "transformers", "matplotlib", "router"} & set(loaded)
