"""From what the user wrote as the model to its ModelShape: a config.json, a folder, a hub id in the local cache, or a published name."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pd_serve.engine.config_json import ConfigJson, read_json
from pd_serve.engine.experts_info import ExpertsInfo
from pd_serve.engine.families.fallback import declared_windows
from pd_serve.engine.families.registry import describe_config
from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.parameters import num_active_parameters, num_parameters
from pd_serve.engine.rope import RopeParams
from pd_serve.errors import ModelError
from pd_serve.model_store.hub import cached_config
from pd_serve.plan.errors import PlanError
from pd_serve.plan.published import PUBLISHED, find_published
from pd_serve.plan.shape import ModelShape

_CONFIG = "config.json"
_RECURRENT = ("mamba_d_state", "ssm_state_size", "state_size", "linear_num_key_heads")

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
_MOST = 1 << 24
"""Of any of these."""
_MOST_LAYERS = 10_000
_MOST_PARAMS = 1e18


def model_shape(model: str, cache_dir: str = "") -> ModelShape:
    """`model`: config.json or its folder, a hub id (owner/name) whose config is in the local cache, or a name of published.py.

    Raises ModelError for a file that cannot be read, PlanError for what is none of these.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return read_shape(read_json(path / _CONFIG), path.resolve().name)
    if path.is_file():
        return read_shape(read_json(path), path.resolve().parent.name if path.name == _CONFIG else path.stem)
    if "/" in model and (cached := cached_config(model, cache_dir)) is not None:
        return read_shape(read_json(cached), model)
    published = find_published(model)
    if published is not None:
        config = ConfigJson(Path(published.name), dict(published.config))
        return read_shape(config, published.name, published.source)
    names = ", ".join(each.name for each in PUBLISHED)
    raise PlanError(f"no model {model!r}: no config.json there, not in the local cache of the hub, and none of {names}")


def read_shape(config: ConfigJson, name: str, source: str = "") -> ModelShape:
    """Raises ModelError where sizes are missing, PlanError for layers that keep no KV of each token."""
    own = _language_model(config)
    _check_sizes(own)
    notes: list[str] = []
    try:
        info = describe_config(own)
        refusal = "pd-serve has no module of its own for it"
    except ModelError as error:
        info, refusal = None, f"pd-serve does not serve it ({error})"
    if info is None:
        info = _common_fields(own)
        notes.append(f"{refusal}; sizes as config.json names them")
    if config.has("quantization_config"):
        notes.append("its weights are quantized, which pd-serve refuses; KV and arithmetic are those of the plain model")
    latent = info.latent
    return ModelShape(
        name=name,
        source=source or str(config.path),
        num_layers=info.num_layers,
        num_heads=info.num_heads,
        num_kv_heads=info.kv_shape.num_heads,
        head_dim=info.kv_shape.head_dim,
        num_planes=info.kv_shape.num_planes,
        query_dim=latent.nope_head_dim + latent.rope_head_dim if latent else info.head_dim,
        value_dim=latent.value_head_dim if latent else info.head_dim,
        layer_windows=info.layer_windows,
        num_params=num_parameters(info),
        num_active_params=num_active_parameters(info),
        max_len=info.max_len,
        dtype=info.dtype,
        notes=tuple(notes),
    )


def with_params(shape: ModelShape, num_params: float) -> ModelShape:
    """With so many parameters instead, for arithmetic in round numbers."""
    if not 1 <= num_params <= _MOST_PARAMS:
        raise PlanError(f"{num_params:g} parameters are not above 0, or too many: expected 1 to {_MOST_PARAMS:g}")
    notes = (*shape.notes, "parameters as given, not as config.json has them")
    return msgspec.structs.replace(shape, num_params=round(num_params), num_active_params=round(num_params), notes=notes)


def _check_sizes(config: ConfigJson) -> None:
    """Raises ModelError for sizes that no model has, before anything is divided by them."""
    for key in _SIZES:
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        if config.has(key) and not 1 <= config.integer(key) <= most:
            raise ModelError(f"{config.path}: {key} is {config.integer(key)}, expected 1 to {most}")


def _language_model(config: ConfigJson) -> ConfigJson:
    """Of a model that takes pictures too, what config.json says of the decoder."""
    if config.has("num_hidden_layers") or not config.has("text_config"):
        return config
    names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in config.texts("architectures")]
    return ConfigJson(config.path, {"architectures": names, **config.section("text_config").values})


def _common_fields(config: ConfigJson) -> ModelInfo:
    """By the names that most decoders share."""
    recurrent = next((key for key in _RECURRENT if config.has(key)), None)
    if recurrent is not None:
        raise PlanError(f"{config.path}: {recurrent} says that it has recurrent layers, whose state is not KV of each token")
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    num_layers = config.integer("num_hidden_layers")
    latent = _latent(config) if config.has("kv_lora_rank") else None
    head_dim = latent.kv_rank + latent.rope_head_dim if latent else config.integer("head_dim", hidden_size // num_heads)
    return ModelInfo(
        architecture=", ".join(config.texts("architectures")),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=1 if latent else config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        norm_eps=0.0,
        rope=RopeParams(theta=0.0),
        max_len=config.integer("max_position_embeddings", 0),
        eos_token_ids=(),
        has_tied_embeddings=config.boolean("tie_word_embeddings", False),
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint="",
        layer_windows=declared_windows(config, num_layers),
        latent=latent,
        experts=_experts(config, num_layers),
    )


def _latent(config: ConfigJson) -> LatentInfo:
    return LatentInfo(
        query_rank=config.integer("q_lora_rank", 0),
        kv_rank=config.integer("kv_lora_rank"),
        nope_head_dim=config.integer("qk_nope_head_dim"),
        rope_head_dim=config.integer("qk_rope_head_dim"),
        value_head_dim=config.integer("v_head_dim"),
        is_interleaved=False,
        query_scale=1.0,
    )


def _experts(config: ConfigJson, num_layers: int) -> ExpertsInfo | None:
    key = next((key for key in ("num_experts", "n_routed_experts", "num_local_experts") if config.has(key)), None)
    if key is None:
        return None
    size = config.integer("moe_intermediate_size") if config.has("moe_intermediate_size") else config.integer("intermediate_size")
    return ExpertsInfo(
        sparse_layers=tuple(range(config.integer("first_k_dense_replace", 0), num_layers)),
        num_experts=config.integer(key),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * config.integer("n_shared_experts", 0),
    )
