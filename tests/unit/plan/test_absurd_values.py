"""What no plan can be made of is refused in one line, and not divided by, waited for or printed as infinite."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from pd_serve.cli.app import run

COST = "cost Llama-3.1-8B"
RATIO = "ratio --rate 30 --input 2000 --output 300 --prefill-tokens-per-s 20000 --decode-tokens-per-s 3000"
SIMULATE = "simulate --gpu H100 --prefill 1 --decode 1 --one-load --rate 3 --limit 60 --slo-ttft-ms 1000"


@pytest.mark.parametrize(
    "line",
    [
        f"{COST} --tflops inf",
        f"{COST} --tflops 1e300",
        f"{COST} --prefill-tokens-per-s 1e-320",
        f"{COST} --gpu H100 --params inf",
        f"{COST} --gpu H100 --link 1e400",
        f"{RATIO} --input 1e-320",
        f"{RATIO} --rate 1e308",
        f"{RATIO} --decode-tokens-per-s 1e-320",
        f"{RATIO} --utilisation 1e-320",
        f"{RATIO} --total-gpus 1000000000",
        f"{SIMULATE} --input 99999999999999999999",
        f"{SIMULATE} --input lognormal:500:50",
        f"{SIMULATE} --rate 1e-300",
        f"{SIMULATE} --scale 1e-9",
        f"{COST} --gpu H100 --prompts 9999999999999999999999",
    ],
)
def test_value_beyond_reason_is_an_error_of_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["plan", *shlex.split(line)])
    told = capsys.readouterr()
    assert (code, told.out, told.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    "line",
    [
        f"{COST} --gpu H100 --itl-slo-ms inf",
        f"{SIMULATE} --scale inf",
        f"{SIMULATE} --turns 3 --think-s inf",
        f"{SIMULATE} --turns 3 --system-tokens 9999999999",
        f"{SIMULATE} --speed-up inf",
        f"{SIMULATE} --minutes inf",
        f"{SIMULATE} --slo-itl-ms inf",
    ],
)
def test_value_beyond_an_options_range_is_named(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = line.split()[-2]
    assert run(["plan", *shlex.split(line)]) == 2
    told = capsys.readouterr()
    assert (told.out, option in told.err) == ("", True)


@pytest.mark.parametrize("row", ["2023-11-16 18:15:46.68,99999999999999999999999,44", "2023-11-16 18:15:46.68,374,-3"])
def test_trace_with_an_impossible_row_is_refused(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:45.00,300,40\n{row}\n")
    assert run(["plan", *shlex.split(f"{SIMULATE} --trace {path}")]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", -1), ("num_hidden_layers", 10**30), ("num_key_value_heads", 0)])
def test_size_that_no_model_has_is_named(key: str, value: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "intermediate_size": 128, **sizes, key: value}))
    assert run(["plan", "cost", str(path), "--gpu", "H100"]) == 1
    assert key in capsys.readouterr().err
