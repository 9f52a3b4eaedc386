"""`pd-serve up` with a model that cannot be served: one line, exit 1, and nothing was started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.engine.model_folders import write_checkpoint, write_config


def truncated(folder: Path) -> None:
    file = write_checkpoint(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def one_shard_missing(folder: Path) -> None:
    (write_checkpoint(folder, num_shards=2) / "model-00002-of-00002.safetensors").unlink()


def unknown_architecture(folder: Path) -> None:
    write_checkpoint(folder, architectures=["GPT2LMHeadModel"])


def without_weights(folder: Path) -> None:
    write_config(folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "truncated"),
        (one_shard_missing, "model-00002-of-00002.safetensors is missing"),
        (unknown_architecture, "architecture not supported (GPT2LMHeadModel)"),
        (without_weights, "holds no safetensors"),
    ],
)
def test_a_damaged_model_is_one_line_before_anything_starts(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(tmp_path / "model")
    command = [sys.executable, "-m", "pd_serve.cli", "up", "--port", "0", "--model", str(tmp_path / "model"), "--log-dir", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("pd-serve: ")
    assert said in line
    assert run.stdout == ""
    assert not list(tmp_path.glob("*.log"))
