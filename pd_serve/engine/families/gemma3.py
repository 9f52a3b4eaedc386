"""Gemma 3, text only: models/gemma3.py computes it. Source: Gemma 3 report (arXiv:2503.19786), section 2.1."""

from __future__ import annotations

from dataclasses import dataclass

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.families.llama import read_layer_windows
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeParams
from pd_serve.errors import ModelError

ARCHITECTURES = ("Gemma3ForCausalLM",)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_DEFAULT_PATTERN = 6
"""One global layer behind every five local ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Info(ModelInfo):
    """`rope` is of layers without a window."""

    local_rope: RopeParams
    query_scale: float
    final_softcap: float
    """Of logits; 0: none."""


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError for what is missing, malformed or not honoured."""
    _refuse_unsupported(config)
    num_heads, num_kv_heads = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot be shared evenly by {num_kv_heads} KV heads")
    trained_len = config.integer("max_position_embeddings")
    has_bias = config.boolean("attention_bias", False)
    return Gemma3Info(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", 256),
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, _GLOBAL, trained_len),
        max_len=trained_len,
        eos_token_ids=(),
        has_tied_embeddings=config.boolean("tie_word_embeddings", True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=False,
        has_qk_norm=True,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint="",
        layer_windows=read_layer_windows(_with_layer_types(config)),
        local_rope=_rope(config, _LOCAL, trained_len),
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        final_softcap=config.number("final_logit_softcapping", 0.0),
    )


def _refuse_unsupported(config: ConfigJson) -> None:
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise ModelError(f"{config.path}: activation {activation} is not supported in Gemma 3 (gelu_pytorch_tanh is)")
    if config.boolean("use_bidirectional_attention", False):
        raise ModelError(f"{config.path}: bidirectional attention is not supported")
    # transformers' own Gemma 3 ignores the key, so there is nothing to be equal to.
    if config.has("attn_logit_softcapping"):
        raise ModelError(f"{config.path}: attn_logit_softcapping is not supported in Gemma 3")


def _with_layer_types(config: ConfigJson) -> ConfigJson:
    """Older configs name the pattern's length only; where all is left out it is six."""
    if config.has("layer_types"):
        return config
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", _DEFAULT_PATTERN))
    types = [_LOCAL if (layer + 1) % pattern else _GLOBAL for layer in range(config.integer("num_hidden_layers"))]
    return ConfigJson(config.path, {**config.values, "layer_types": types})


def _rope(config: ConfigJson, layer_type: str, trained_len: int) -> RopeParams:
    """Newer configs hold parameters by kind of layer, older ones `rope_theta`, `rope_local_base_freq` and a scaling of global layers."""
    is_global = layer_type == _GLOBAL
    theta = config.number("rope_theta", 1e6) if is_global else config.number("rope_local_base_freq", 1e4)
    values: dict[str, object] = {"rope_theta": theta}
    own = config.section("rope_parameters").section(layer_type)
    if own.values:
        values["rope_parameters"] = own.values
    elif is_global:
        values["rope_scaling"] = config.values.get("rope_scaling")
    return RopeParams.from_config(ConfigJson(config.path, values), trained_len)
