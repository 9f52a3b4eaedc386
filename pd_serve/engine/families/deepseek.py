"""DeepSeek-V2 and V3: latent attention and a mixture of experts; models/deepseek.py computes them.

Sources: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

import math

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.experts_info import ExpertsInfo, Scoring
from pd_serve.engine.families.llama import refuse_unsupported
from pd_serve.engine.families.moe import check_experts
from pd_serve.engine.latent_info import LatentInfo
from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeParams, RopeType
from pd_serve.errors import ModelError

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ARCHITECTURES = (V2, V3)


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError for what is missing, malformed or not honoured."""
    refuse_unsupported(config, architecture)
    trained_len = config.integer("max_position_embeddings")
    latent = _latent(config, is_v2=architecture == V2)
    experts = _v2_experts(config) if architecture == V2 else _v3_experts(config)
    check_experts(config, experts)
    attention_bias = config.boolean("attention_bias", False)
    return ModelInfo(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_head_dim,
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=RopeParams.from_config(config, trained_len),
        max_len=trained_len,
        eos_token_ids=(),
        has_tied_embeddings=config.boolean("tie_word_embeddings", False),
        has_qkv_bias=attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=config.boolean("mlp_bias", False),
        has_qk_norm=False,
        dtype=config.text("dtype", config.text("torch_dtype", "")),
        fingerprint="",
        latent=latent,
        experts=experts,
    )


def _latent(config: ConfigJson, *, is_v2: bool) -> LatentInfo:
    nope, rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    if rope % 2:
        raise ModelError(f"{config.path}: qk_rope_head_dim {rope} is odd: rotary embedding needs an even one")
    return LatentInfo(
        query_rank=config.integer("q_lora_rank", 0),
        kv_rank=config.integer("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=config.integer("v_head_dim"),
        is_interleaved=is_v2 or config.boolean("rope_interleave", True),
        query_scale=(nope + rope) ** -0.5 * _yarn_scale(config) ** 2,
    )


def _yarn_scale(config: ConfigJson) -> float:
    """Of queries and of keys, for the temperature of longer contexts (YaRN, arXiv:2309.00071, section 3.4)."""
    params = config.section("rope_parameters")
    if not params.values:
        params = config.section("rope_scaling")
    weight = params.number("mscale_all_dim", 0.0)
    if params.text("rope_type", params.text("type", "default")) == RopeType.DEFAULT.value or not weight:
        return 1.0
    factor = params.number("factor")
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _sparse_layers(config: ConfigJson, default_first: int) -> tuple[int, ...]:
    if config.integer("moe_layer_freq", 1) != 1:
        raise ModelError(f"{config.path}: moe_layer_freq other than 1 is not supported")
    return tuple(range(config.integer("first_k_dense_replace", default_first), config.integer("num_hidden_layers")))


def _v2_experts(config: ConfigJson) -> ExpertsInfo:
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{config.path}: topk_method {method!r} is not supported in DeepSeek-V2")
    if config.text("scoring_func", "softmax") != "softmax" or config.boolean("norm_topk_prob", False):
        raise ModelError(f"{config.path}: DeepSeek-V2 routes by softmax without norm_topk_prob; nothing else is supported")
    is_grouped = method == "group_limited_greedy"
    size = config.integer("moe_intermediate_size")
    return ExpertsInfo(
        sparse_layers=_sparse_layers(config, 0),
        num_experts=config.integer("n_routed_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * config.integer("n_shared_experts", 0),
        has_float32_router=True,
        num_groups=config.integer("n_group") if is_grouped else 1,
        num_chosen_groups=config.integer("topk_group") if is_grouped else 1,
        scaling=config.number("routed_scaling_factor", 1.0),
    )


def _v3_experts(config: ConfigJson) -> ExpertsInfo:
    if config.text("scoring_func", "sigmoid") != "sigmoid" or config.text("topk_method", "noaux_tc") != "noaux_tc":
        raise ModelError(f"{config.path}: DeepSeek-V3 routes by sigmoid with noaux_tc; nothing else is supported")
    size = config.integer("moe_intermediate_size")
    experts = ExpertsInfo(
        sparse_layers=_sparse_layers(config, 3),
        num_experts=config.integer("n_routed_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * config.integer("n_shared_experts", 1),
        scoring=Scoring.SIGMOID_BIASED,
        has_float32_router=True,
        num_groups=config.integer("n_group", 1),
        num_chosen_groups=config.integer("topk_group", 1),
        is_normalized=config.boolean("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
    )
    if experts.num_experts < 2 * experts.num_groups:
        raise ModelError(f"{config.path}: a group of experts is judged by its best two; {experts.num_groups} groups are too many")
    return experts
