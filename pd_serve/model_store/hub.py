"""Models from the Hugging Face hub. The only file that knows huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from pd_serve.errors import ModelError
from pd_serve.model_store.progress import Progress

_WANTED = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
_CONNECT_TIMEOUT_S = 10.0


def download(model_id: str, cache_dir: str, progress: Progress) -> Path:
    """Folder of a snapshot of `owner/name[@revision]`; fetched when the hub's cache lacks it, served from that cache when offline.

    Raises ModelError naming the model and the cause when it is unknown, gated or cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ModelError(f"{model_id} is not a local folder, and downloading needs pip install huggingface_hub") from error
    repo_id, _, revision = model_id.partition("@")
    progress(f"fetching {model_id} from the Hugging Face hub", 0, 0)
    try:
        folder = Path(
            snapshot_download(
                repo_id,
                revision=revision or None,
                cache_dir=str(Path(cache_dir).expanduser() / "hub") if cache_dir else None,
                allow_patterns=list(_WANTED),
                etag_timeout=_CONNECT_TIMEOUT_S,
            )
        )
    except GatedRepoError as error:
        raise ModelError(f"{model_id} is gated: accept its licence on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the Hugging Face hub has no model {model_id} (or it is private: set HF_TOKEN)") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"cannot reach the Hugging Face hub to fetch {model_id}, and it is not in the local cache") from error
    except (HFValidationError, OSError, ValueError) as error:
        raise ModelError(f"cannot fetch {model_id}: {_first_line(error)}") from error
    progress(f"fetched {model_id}", 1, 1)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model_id} has no config.json: not a model that transformers could load either")
    return folder


def cached_config(model_id: str, cache_dir: str) -> Path | None:
    """config.json of `owner/name[@revision]` where the hub's cache has it; nothing is fetched. None where it has not."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    repo_id, _, revision = model_id.partition("@")
    folder = str(Path(cache_dir).expanduser() / "hub") if cache_dir else None
    try:
        found = try_to_load_from_cache(repo_id, "config.json", cache_dir=folder, revision=revision or None)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def config_errors() -> type[Exception]:
    """What transformers raises, through this library, for a config whose fields are of wrong types."""
    from huggingface_hub.errors import StrictDataclassError

    return StrictDataclassError
