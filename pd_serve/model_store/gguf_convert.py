"""From a GGUF file to the folder that every loader of Hugging Face checkpoints reads. Needs no torch.

What differs by architecture is in gguf_llama.py and gguf_gemma3.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import ModelError
from pd_serve.model_store import gguf_gemma3, gguf_llama
from pd_serve.model_store.gguf_fields import GGUFFields
from pd_serve.model_store.gguf_tokenizer import write_sentencepiece_tokenizer, write_tokenizer
from pd_serve.model_store.progress import Progress
from pd_serve.model_store.safetensors_file import write_bfloat16

if TYPE_CHECKING:
    import gguf

CONVERTER_VERSION = 1
"""Raised when the same file would convert to something else."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class _Form:
    """How one architecture is stored."""

    layer_names: Mapping[str, str]
    read_config: Callable[..., dict[str, object]]
    restore: Callable[[GGUFFields, str, NDArray[np.float32]], NDArray[np.float32]]


_FORMS: Mapping[str, _Form] = {
    "llama": _Form(gguf_llama.LAYER_NAMES, gguf_llama.read_config, gguf_llama.restore),
    "gemma3": _Form(gguf_gemma3.LAYER_NAMES, gguf_gemma3.read_config, gguf_gemma3.restore),
}


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Fill the empty folder `target` with config.json, generation_config.json, tokenizer files and model.safetensors in bfloat16.

    Raises ModelError when the `gguf` library is missing, the file is damaged or is of another architecture.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError('converting the demo model needs the gguf library: pip install "pd-serve[demo]"') from error
    progress("reading the demo model", 0, 0)
    try:
        reader = gguf.GGUFReader(source)
        fields = GGUFFields(reader)
        form = _form(fields)
        config = form.read_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        if fields.text("tokenizer.ggml.model") == "llama":
            write_sentencepiece_tokenizer(source, target)
        else:
            write_tokenizer(fields, int(str(config["max_position_embeddings"])), target)
        _write_config(fields, config, target)
        _write_weights(reader, form, target, progress)
    except (KeyError, IndexError, ValueError) as error:
        raise ModelError(f"{source} is not a GGUF file this can convert: {error}") from error


def _form(fields: GGUFFields) -> _Form:
    architecture = fields.text("general.architecture")
    if architecture not in _FORMS:
        raise ModelError(f"only {' and '.join(_FORMS)} GGUF files are converted, not {architecture!r}")
    return _FORMS[architecture]


def _write_config(fields: GGUFFields, config: Mapping[str, object], target: Path) -> None:
    ids = {"bos_token_id": fields.integer("tokenizer.ggml.bos_token_id"), "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id")}
    (target / "config.json").write_text(json.dumps({**config, **ids}, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _write_weights(reader: gguf.GGUFReader, form: _Form, target: Path, progress: Progress) -> None:
    # GGUF names its dimensions innermost first.
    shapes = [(_checkpoint_name(form, tensor.name), tuple(int(n) for n in reversed(tensor.shape))) for tensor in reader.tensors]
    fields = GGUFFields(reader)

    def tensors() -> Iterator[NDArray[np.float32]]:
        import gguf

        for index, tensor in enumerate(reader.tensors):
            progress("converting the demo model", index, len(shapes))
            values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            yield form.restore(fields, tensor.name, values)
        progress("converting the demo model", len(shapes), len(shapes))

    write_bfloat16(target / "model.safetensors", shapes, tensors())


def _checkpoint_name(form: _Form, gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{form.layer_names[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
