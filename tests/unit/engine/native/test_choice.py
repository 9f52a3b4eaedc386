from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pd_serve.engine.native import build, choice
from pd_serve.engine.native.build import Compiler, build_library, find_compiler
from pd_serve.engine.native.choice import open_operators
from pd_serve.errors import ConfigError
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.model_store.progress import ignore_progress

CPU = torch.device("cpu")


def _layout(head_dim: int = 32, dtype: KVDtype = KVDtype.BFLOAT16, num_planes: int = 2) -> KVLayout:
    return KVLayout(1, 1, head_dim, 16, 4, dtype, num_planes)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (_layout(head_dim=24), torch.bfloat16),
        (_layout(head_dim=512), torch.bfloat16),
        (_layout(num_planes=1), torch.bfloat16),
        (_layout(dtype=KVDtype.FP8_E4M3), torch.bfloat16),
        (_layout(dtype=KVDtype.FLOAT16), torch.float16),
    ],
)
def test_what_they_do_not_fit_goes_without_them_or_is_an_error(layout: KVLayout, dtype: torch.dtype, tmp_path: Path) -> None:
    assert open_operators("auto", layout, dtype, CPU, str(tmp_path)) is None
    with pytest.raises(ConfigError, match=r"engine\.cpu_ops is on, but"):
        open_operators("on", layout, dtype, CPU, str(tmp_path))


def test_off_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(choice, "find_compiler", lambda: pytest.fail("asked"))
    assert open_operators("off", _layout(), torch.bfloat16, CPU, str(tmp_path)) is None


def test_without_a_compiler_auto_goes_without_and_on_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None
    assert open_operators("auto", _layout(), torch.bfloat16, CPU, str(tmp_path)) is None
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        open_operators("on", _layout(), torch.bfloat16, CPU, str(tmp_path))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\n[ $1 = --version ] && echo broken 1.0 && exit 0\necho what an odd source >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CXX", str(script))
    assert find_compiler() == Compiler(str(script), "broken 1.0")
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match="what an odd source"):
        open_operators("on", _layout(), torch.bfloat16, CPU, str(cache))
    assert not list(cache.rglob("*.so"))


def test_a_library_is_built_once_and_again_when_the_processor_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(build, "_compile", lambda _compiler, _head_dim, folder: compiled.append(folder))
    compiler = Compiler("/usr/bin/c++", "1")
    first = build_library(compiler, 64, str(tmp_path), ignore_progress)
    assert build_library(compiler, 64, str(tmp_path), ignore_progress) == first
    assert len(compiled) == 1
    monkeypatch.setattr(build, "processor", lambda: "another")
    assert build_library(compiler, 64, str(tmp_path), ignore_progress) != first
    assert len(compiled) == 2
