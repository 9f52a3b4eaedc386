"""Any other causal language model of transformers whose attention can be replaced: models/fallback.py runs transformers' own classes.

What the config can tell is refused here; what only the model's classes tell, at load. transformers is imported when such a model is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeParams
from pd_serve.errors import ModelError
from pd_serve.model_store.hub import config_errors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SUFFIX = "ForCausalLM"
_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope", "su"})

_LONGEST_REASON = 200
_ALIBI = frozenset({"bloom", "mpt"})
"""Models whose configs do not say that they have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackInfo(ModelInfo):
    """Of its fields those that say how to build the model are not used: transformers reads its own config."""

    folder: Path
    softcap: float
    """Of attention scores; 0: none."""


def is_known(architecture: str) -> bool:
    """Whether transformers has such a causal language model."""
    if not architecture.endswith(_SUFFIX):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError naming what is missing, malformed or not honoured."""
    own = ConfigJson(config.path, _normalized(config.path.parent).to_dict())
    _refuse_unsupported(own, architecture)
    hidden_size, num_heads = own.integer("hidden_size"), own.integer("num_attention_heads")
    num_layers = own.integer("num_hidden_layers")
    return FallbackInfo(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=own.integer("intermediate_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=own.integer("num_key_value_heads", num_heads),
        head_dim=own.integer("head_dim", hidden_size // num_heads),
        vocab_size=own.integer("vocab_size"),
        norm_eps=0.0,
        rope=RopeParams(theta=0.0),
        max_len=own.integer("max_position_embeddings"),
        eos_token_ids=(),
        has_tied_embeddings=own.boolean("tie_word_embeddings", False),
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint="",
        layer_windows=declared_windows(own, num_layers),
        folder=config.path.parent,
        softcap=own.number("attn_logit_softcapping", 0.0),
    )


def _normalized(folder: Path) -> PreTrainedConfig:
    """The config with every default filled in, and with the names that most models share."""
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, config_errors()) as error:
        raise ModelError(f"{folder}: transformers cannot read the config: {one_line(error)}") from error
    for name in set(config.attribute_map) & _SHARED_NAMES:
        # Kept under the model's own name only; to_dict() shows what is set.
        config.__dict__[name] = getattr(config, name)
    return config


_SHARED_NAMES = frozenset(
    {"hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings", "intermediate_size"}
)


def one_line(error: Exception) -> str:
    """Of what transformers says, which may be a page."""
    return " ".join(str(error).split())[:_LONGEST_REASON]


def _refuse_unsupported(config: ConfigJson, architecture: str) -> None:
    found = [
        name
        for name, is_there in {
            "an encoder": config.boolean("is_encoder_decoder", False),
            "cross attention": config.boolean("add_cross_attention", False),
            "bidirectional attention": config.boolean("use_bidirectional_attention", False),
            "ALiBi": config.text("model_type", "") in _ALIBI or any(config.boolean(key, False) for key in ("alibi", "use_alibi")),
            "latent attention (MLA)": config.has("kv_lora_rank"),
            "chunked attention": config.has("attention_chunk_size"),
            "recurrent layers": any(config.has(key) for key in ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads")),
        }.items()
        if is_there
    ]
    unknown = sorted(set(config.texts("layer_types")) - {"full_attention", "sliding_attention"})
    found += [f"layers of type {name}" for name in unknown]
    found += [f"rotary scaling {name!r}" for name in sorted(_rope_types(config) & _LENGTH_DEPENDENT_ROPES)]
    if found:
        raise ModelError(f"{config.path}: {architecture} has {', '.join(found)}: not supported")


def _rope_types(config: ConfigJson) -> set[str]:
    """Newer configs hold parameters for all layers, or by kind of layer."""
    params = config.section("rope_parameters")
    by_kind = [params.section(key) for key, value in params.values.items() if isinstance(value, dict)]
    return {section.text("rope_type", "default") for section in (params, *by_kind)}


def declared_windows(config: ConfigJson, num_layers: int) -> tuple[int, ...]:
    """As ModelInfo.layer_windows, by the names that most decoders share; nothing is refused."""
    window = config.integer("sliding_window", 0) if config.boolean("use_sliding_window", True) else 0
    types = config.texts("layer_types") or ("sliding_attention",) * num_layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in types) if window else ()
