"""From what the user wrote as the model to a folder on disk. Called by the cli and by every process that needs the folder."""

from __future__ import annotations

import re
from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.model_store.cache import cache_root
from pd_serve.model_store.demo import prepare_demo
from pd_serve.model_store.demo_gemma3 import prepare_demo_gemma3
from pd_serve.model_store.hub import download
from pd_serve.model_store.progress import Progress, ignore_progress

DEMO_ID = "demo"
DEMO_GEMMA3_ID = "demo-gemma3"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def resolve_model(model_id: str, cache_dir: str = "", progress: Progress = ignore_progress) -> Path:
    """The folder that holds config.json, the tokenizer and (unless weights are random) the safetensors of `model_id`.

    The demos are converted once into the cache; an existing folder is used where it lies; `owner/name` or `owner/name@revision` is
    downloaded from the Hugging Face hub (once: the hub's own cache, under `cache_dir` where that is given). Blocks meanwhile.

    Raises ModelError, one line, when there is no such model or it cannot be fetched.
    """
    if model_id == DEMO_ID:
        return prepare_demo(cache_root(cache_dir), progress)
    if model_id == DEMO_GEMMA3_ID:
        return prepare_demo_gemma3(cache_root(cache_dir), progress)
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is not a model folder: it has no config.json")
        return folder.resolve()
    if folder.exists():
        raise ModelError(f"{folder} is a file; give the folder that holds config.json and the safetensors")
    if _HUB_ID.fullmatch(model_id):
        return download(model_id, cache_dir, progress)
    raise ModelError(f"no model {model_id!r}: neither a folder nor a Hugging Face id (owner/name) nor `{DEMO_ID}`")
