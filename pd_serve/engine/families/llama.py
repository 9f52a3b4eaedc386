"""Llama, Mistral, Qwen2 and Qwen3: models/llama.py computes them. `read_common` is for families that differ in a few fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeParams
from pd_serve.errors import ModelError


@dataclass(frozen=True, slots=True)
class LlamaTraits:
    """How one architecture differs from Llama where its config does not say."""

    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""
    output_bias: bool | None = None
    has_qk_norm: bool = False


ARCHITECTURES: Mapping[str, LlamaTraits] = {
    "LlamaForCausalLM": LlamaTraits(),
    "MistralForCausalLM": LlamaTraits(qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": LlamaTraits(qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": LlamaTraits(has_qk_norm=True),
}


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError for what is missing, malformed or not honoured."""
    return read_common(config, architecture, ARCHITECTURES[architecture])


def read_common(config: ConfigJson, architecture: str, family: LlamaTraits) -> ModelInfo:
    """Fields that most decoders name alike."""
    refuse_unsupported(config, architecture)
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
        max_len=trained_len,
        eos_token_ids=(),
        has_tied_embeddings=config.boolean("tie_word_embeddings", False),
        has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
        has_mlp_bias=config.boolean("mlp_bias", False),
        has_qk_norm=family.has_qk_norm,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint="",
        layer_windows=read_layer_windows(config),
    )


def refuse_unsupported(config: ConfigJson, architecture: str) -> None:
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{config.path}: activation {activation} is not supported in {architecture} (silu is)")
    if any(section.number("partial_rotary_factor", 1.0) != 1.0 for section in (config, config.section("rope_parameters"))):
        raise ModelError(f"{config.path}: partial rotary embedding is not supported")


def read_layer_windows(config: ConfigJson) -> tuple[int, ...]:
    """As ModelInfo.layer_windows. Raises ModelError for layers that are no causal attention."""
    num_layers = config.integer("num_hidden_layers")
    layer_types = config.texts("layer_types")
    if layer_types:
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(f"{config.path}: layers of type {', '.join(unknown)} are not supported")
        if len(layer_types) != num_layers:
            raise ModelError(f"{config.path}: {len(layer_types)} layer_types for {num_layers} layers")
        slides = [kind == "sliding_attention" for kind in layer_types]
    else:
        # Qwen says so by a flag (and slides from layer `max_window_layers` on); Mistral's window alone says it.
        first = config.integer("max_window_layers", 0) if config.boolean("use_sliding_window", True) else num_layers
        slides = [layer >= first for layer in range(num_layers)]
    window = config.integer("sliding_window", 0)
    return tuple(window if does_slide else 0 for does_slide in slides) if window and any(slides) else ()
