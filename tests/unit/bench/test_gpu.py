"""`make bench-gpu` runs every part whatever becomes of the others, and fits into its time."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench import gpu
from tests.bench.gpu_figures import Figure, Limits, Task

TASK = Task("cpu", "nowhere", 16, Limits())


def _script(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def test_all_parts_together_fit_into_eight_minutes() -> None:
    assert sum(part.limit_s for part in gpu.PARTS.values()) < gpu.MAX_TOTAL_S
    assert next(iter(gpu.PARTS)) == "limits"


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    figures = [Figure("copy", 2.0, "GB/s"), Figure("matmul", 3.0, "TFLOP/s")]
    (tmp_path / "limits.json").write_bytes(msgspec.json.encode(figures))
    (tmp_path / "later.json").write_bytes(msgspec.json.encode(figures[:1]))
    commands = {
        "limits": _script("pass"),
        "broken": _script("raise SystemExit('CUDA error: an illegal memory access')"),
        "hanging": _script("import signal; signal.pause()"),
        "later": _script("pass"),
    }
    parts = {name: gpu.Part("", 0 if name == "hanging" else 60) for name in commands}
    results = gpu.run_parts(parts, TASK, tmp_path, commands.__getitem__)
    assert [(result.name, result.error) for result in results] == [
        ("limits", ""),
        ("broken", "CUDA error: an illegal memory access"),
        ("hanging", "not done within 0 s"),
        ("later", ""),
    ]
    assert results[3].figures == tuple(figures[:1])
    told = msgspec.json.decode((tmp_path / "task.json").read_bytes(), type=Task)
    assert told.limits == Limits(2e9, 3e12)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "_device_name", lambda: None)
    assert gpu.main([]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_every_part_can_be_found() -> None:
    for part in gpu.PARTS.values():
        module, _, name = part.function.partition(":")
        assert f"def {name}(" in (Path(gpu.__file__).parent / f"{module.rpartition(chr(46))[2]}.py").read_text()
