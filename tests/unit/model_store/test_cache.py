from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pd_serve.errors import ModelError
from pd_serve.model_store.cache import cache_root, prepare_once
from pd_serve.model_store.progress import ignore_progress

_PREPARE = """
import sys, time
from pathlib import Path
from pd_serve.model_store.cache import prepare_once
from pd_serve.model_store.progress import ignore_progress

def build(target):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    time.sleep(0.2)
    (target / "config.json").write_text("{}")

print((prepare_once(Path(sys.argv[1]), build, ignore_progress) / "config.json").read_text())
"""


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", _PREPARE, str(tmp_path / "cache" / "model"), str(tmp_path / "log")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert outputs == ["{}\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_waiting_caller_is_told_that_it_waits(tmp_path: Path) -> None:
    is_building, may_finish = threading.Event(), threading.Event()

    def build(_target: Path) -> None:
        is_building.set()
        assert may_finish.wait(10)

    first = threading.Thread(target=prepare_once, args=(tmp_path / "model", build, ignore_progress))
    first.start()
    assert is_building.wait(10)
    told: list[str] = []

    def progress(what: str, _done: int, _total: int) -> None:
        told.append(what)
        may_finish.set()

    prepare_once(tmp_path / "model", build, progress)
    first.join(10)
    assert told == ["waiting for another process to prepare model"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        prepare_once(tmp_path / "model", fail, ignore_progress)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert prepare_once(tmp_path / "model", lambda _target: None, ignore_progress).is_dir()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".unfinished-model-abc"
    leftover.mkdir()
    prepare_once(tmp_path / "model", lambda _target: None, ignore_progress)
    assert not leftover.exists()


def test_an_unusable_cache_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"^cannot prepare [^\n]*: File exists$"):
        prepare_once(tmp_path / "file" / "model", lambda _target: None, ignore_progress)


def test_cache_root_follows_the_setting_then_xdg_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root("/elsewhere") == Path("/elsewhere")
    assert cache_root("") == tmp_path / "pd-serve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root("") == tmp_path / "home" / ".cache" / "pd-serve"
