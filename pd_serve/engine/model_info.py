"""What config.json says about a model, checked: everything the engine needs to build it, and a refusal by name of what it cannot honour.

Called by the loader and, before any weight is read, by the worker that sizes its pool. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.config_json import ConfigJson, read_json
from pd_serve.engine.rope import RopeParams
from pd_serve.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Family:
    """How one architecture differs from Llama where its config does not say."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    output_bias: bool | None = None
    has_qk_norm: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": _Family(has_qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of each token."""

    num_planes: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A decoder-only transformer with grouped-query attention and a gated MLP. Sizes are of the whole model, not of a shard."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeParams
    max_len: int
    """Longest prompt + output in tokens that the model was trained for (its sliding window where that is shorter)."""
    eos_token_ids: tuple[int, ...]
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    dtype: str
    """Type the checkpoint says it is in, such as `bfloat16`; empty where it does not say."""
    fingerprint: str
    """Equal for equal models (see Checkpoint.fingerprint): workers exchange KV only when it is."""

    @property
    def kv_shape(self) -> KVShape:
        return KVShape(2, self.num_kv_heads, self.head_dim)


def describe(path: Path, *, has_weights: bool = True) -> ModelInfo:
    """Read and check the folder's config and safetensors headers, not the weights. `has_weights` False: config.json alone is enough.

    Raises ModelError, one line: no such folder, unknown architecture, a feature that is not honoured, a missing or damaged shard.
    """
    config = read_json(path / "config.json")
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unsupported(config, architecture)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot be shared evenly by {num_kv_heads} KV heads")
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd: rotary embedding needs an even one")
    attention_bias = config.boolean("attention_bias", False)
    trained_len = config.integer("max_position_embeddings")
    return ModelInfo(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=RopeParams.from_config(config, trained_len),
        max_len=min(trained_len, _sliding_window(config) or trained_len),
        eos_token_ids=_eos_token_ids(path, config),
        has_tied_embeddings=config.boolean("tie_word_embeddings", False),
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
        has_mlp_bias=config.boolean("mlp_bias", False),
        has_qk_norm=family.has_qk_norm,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint=Checkpoint.open(path).fingerprint() if has_weights else _config_fingerprint(config),
    )


def _architecture(config: ConfigJson) -> str:
    names = config.texts("architectures")
    for name in names:
        if name in _FAMILIES:
            return name
    shown = ", ".join(names) or "none named"
    raise ModelError(f"{config.path}: architecture not supported ({shown}); supported: {', '.join(_FAMILIES)}")


def _refuse_unsupported(config: ConfigJson, architecture: str) -> None:
    if config.has("quantization_config"):
        method = config.section("quantization_config").text("quant_method", "unnamed")
        raise ModelError(f"{config.path}: quantized weights ({method}) are not supported")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{config.path}: activation {activation} is not supported in {architecture} (silu is)")
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{config.path}: partial rotary embedding is not supported")


def _sliding_window(config: ConfigJson) -> int:
    """Tokens after which a sliding window would begin to hide keys; 0 where none does.

    Within its window a model with sliding attention equals one without, so such a model is served up to the window.
    """
    layer_types = config.texts("layer_types")
    if layer_types:
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"{config.path}: layers of type {', '.join(unknown)} are not supported")
        slides = "sliding_attention" in layer_types
    else:
        # Qwen says so by a flag (and slides from layer `max_window_layers` on); Mistral's window alone says it.
        num_layers = config.integer("num_hidden_layers")
        slides = config.boolean("use_sliding_window", True) and config.integer("max_window_layers", 0) < num_layers
    return config.integer("sliding_window", 0) if slides else 0


def _eos_token_ids(path: Path, config: ConfigJson) -> tuple[int, ...]:
    """Generation stops where generation_config.json says, else where config.json says: as transformers does."""
    generation = path / "generation_config.json"
    if generation.is_file():
        ids = read_json(generation).integers("eos_token_id")
        if ids:
            return ids
    return config.integers("eos_token_id")


def _config_fingerprint(config: ConfigJson) -> str:
    canonical = json.dumps(config.values, sort_keys=True).encode()
    return "random-" + hashlib.sha256(canonical).hexdigest()[:32]
