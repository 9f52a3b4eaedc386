"""From a llama-architecture GGUF file to the folder that every loader of Hugging Face checkpoints reads. Needs no torch.

llama.cpp stores the rows of the q and k projections in pairs (for its interleaved rotary embedding); transformers wants halves. Undoing
that permutation and dequantizing gives tensors bit-equal to what transformers itself reads from the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import ModelError
from pd_serve.model_store.gguf_tokenizer import write_tokenizer
from pd_serve.model_store.progress import Progress
from pd_serve.model_store.safetensors_file import write_bfloat16

if TYPE_CHECKING:
    import gguf

CONVERTER_VERSION = 1
"""Raised when the same file would convert to something else."""

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Geometry:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    max_len: int
    rope_theta: float
    norm_eps: float
    vocab_size: int


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
        geometry = _read_geometry(fields)
        write_tokenizer(fields, geometry.max_len, target)
        _write_config(fields, geometry, target, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        _write_weights(reader, geometry, target, progress)
    except (KeyError, IndexError, ValueError) as error:
        raise ModelError(f"{source} is not a GGUF file this can convert: {error}") from error


class GGUFFields:
    """Typed access to the key-value part of a GGUF file. Every method raises KeyError for a missing key, ValueError for another type."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def has(self, key: str) -> bool:
        return key in self._fields

    def text(self, key: str) -> str:
        value = self._fields[key].contents()
        if not isinstance(value, str):
            raise ValueError(f"{key} is not a string")
        return value

    def integer(self, key: str) -> int:
        return int(self._fields[key].contents())

    def number(self, key: str) -> float:
        return float(self._fields[key].contents())

    def texts(self, key: str) -> list[str]:
        return [str(value) for value in self._fields[key].contents()]

    def integers(self, key: str) -> list[int]:
        return [int(value) for value in self._fields[key].contents()]


def _read_geometry(fields: GGUFFields) -> _Geometry:
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise ModelError(f"only llama GGUF files are converted, not {architecture!r}")
    return _Geometry(
        num_layers=fields.integer("llama.block_count"),
        hidden_size=fields.integer("llama.embedding_length"),
        intermediate_size=fields.integer("llama.feed_forward_length"),
        num_heads=fields.integer("llama.attention.head_count"),
        num_kv_heads=fields.integer("llama.attention.head_count_kv"),
        max_len=fields.integer("llama.context_length"),
        rope_theta=fields.number("llama.rope.freq_base"),
        # Stored as float32: 9.999999747e-06 is 1e-05.
        norm_eps=float(np.format_float_positional(np.float32(fields.number("llama.attention.layer_norm_rms_epsilon")), trim="-")),
        vocab_size=fields.integer("llama.vocab_size"),
    )


def _write_config(fields: GGUFFields, geometry: _Geometry, target: Path, *, tied: bool) -> None:
    ids = {"bos_token_id": fields.integer("tokenizer.ggml.bos_token_id"), "eos_token_id": fields.integer("tokenizer.ggml.eos_token_id")}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.hidden_size // geometry.num_heads,
        "max_position_embeddings": geometry.max_len,
        "rms_norm_eps": geometry.norm_eps,
        "rope_theta": geometry.rope_theta,
        "vocab_size": geometry.vocab_size,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **ids,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _write_weights(reader: gguf.GGUFReader, geometry: _Geometry, target: Path, progress: Progress) -> None:
    # GGUF names its dimensions innermost first.
    shapes = [(_checkpoint_name(tensor.name), tuple(int(n) for n in reversed(tensor.shape))) for tensor in reader.tensors]

    def tensors() -> Iterator[NDArray[np.float32]]:
        import gguf

        for index, tensor in enumerate(reader.tensors):
            progress("converting the demo model", index, len(shapes))
            values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if tensor.name.endswith("attn_q.weight"):
                values = _unpermute(values, geometry.num_heads)
            elif tensor.name.endswith("attn_k.weight"):
                values = _unpermute(values, geometry.num_kv_heads)
            yield values
        progress("converting the demo model", len(shapes), len(shapes))

    write_bfloat16(target / "model.safetensors", shapes, tensors())


def _checkpoint_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs (x0 y0 x1 y1 …) back to halves (x0 x1 … y0 y1 …); `weight` is [num_heads * head_dim, hidden]."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
