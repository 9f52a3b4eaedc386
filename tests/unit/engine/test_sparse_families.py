"""What configs of models with latents and experts say, and what of it is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pd_serve.engine.experts_info import ExpertsInfo, Scoring
from pd_serve.engine.families.registry import describe
from pd_serve.engine.model_info import KVShape, ModelInfo
from pd_serve.engine.parameters import num_parameters
from pd_serve.errors import ModelError

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **COMMON,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
V2 = {**DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"]}
V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}
QWEN3 = {**COMMON, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 24}
MIXTRAL = {**COMMON, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}


def _describe(folder: Path, config: dict[str, Any], **changes: object) -> ModelInfo:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return describe(folder, has_weights=False)


def _experts(folder: Path, config: dict[str, Any], **changes: object) -> ExpertsInfo:
    experts = _describe(folder, config, **changes).experts
    assert experts is not None
    return experts


def test_a_latent_is_one_head_of_one_plane(tmp_path: Path) -> None:
    info = _describe(tmp_path, V3)
    assert info.kv_shape == KVShape(1, 1, 20)
    assert info.latent is not None
    assert info.latent.query_scale == pytest.approx(12**-0.5)
    assert (info.latent.query_rank, _describe(tmp_path, V3, q_lora_rank=6).latent.query_rank) == (0, 6)  # type: ignore[union-attr]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_scales_queries_and_keys(key: str, tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
    info = _describe(tmp_path, V3, **{key: yarn})
    assert info.latent is not None
    assert info.latent.query_scale == pytest.approx(12**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert info.rope.attention_factor == 1.0


def test_the_families_route_each_in_its_way(tmp_path: Path) -> None:
    v2, v3, qwen3, mixtral = (_experts(tmp_path, config) for config in (V2, V3, QWEN3, MIXTRAL))
    assert (v2.scoring, v2.num_groups, v2.is_normalized, v2.shared_intermediate_size) == (Scoring.SOFTMAX, 1, False, 48)
    assert (v3.scoring, v3.num_groups, v3.num_chosen_groups, v3.is_normalized) == (Scoring.SIGMOID_BIASED, 4, 2, True)
    assert v2.sparse_layers == v3.sparse_layers == (1, 2, 3)
    assert (qwen3.is_normalized, qwen3.intermediate_size, qwen3.sparse_layers) == (False, 24, (0, 1, 2, 3))
    assert (mixtral.is_normalized, mixtral.intermediate_size, mixtral.names.block) == (True, 64, "block_sparse_moe")


def test_qwen3_lists_its_plain_layers(tmp_path: Path) -> None:
    assert _experts(tmp_path, QWEN3, decoder_sparse_step=2, mlp_only_layers=[3]).sparse_layers == (1,)


def test_the_count_of_experts_is_read_in_both_spellings(tmp_path: Path) -> None:
    assert _experts(tmp_path, QWEN3, num_experts=None, num_local_experts=6).num_experts == 6


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"topk_method": "group_limited_greedy"}, "n_group is missing"),
        (V3, {"scoring_func": "softmax"}, "nothing else is supported"),
        (V3, {"n_group": 3}, "8 experts in 3 groups"),
        (V3, {"n_group": 8, "topk_group": 4}, "8 groups are too many"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"qk_rope_head_dim": 5}, "odd"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantized weights .fp8"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (QWEN3, {"num_experts_per_tok": 9}, "9 experts per token of 8"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is missing"),
        (MIXTRAL, {"hidden_act": "gelu"}, "activation gelu"),
    ],
)
def test_what_is_not_honoured_is_refused_in_one_line(
    config: dict[str, Any], changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        _describe(tmp_path, config, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "size", "elements_per_token"),
    [
        ("deepseek-v2-lite", 15.7e9, 27 * 576),
        ("deepseek-v3", 671e9, 61 * 576),
        ("qwen3-30b-a3b", 30.5e9, 48 * 2 * 4 * 128),
        ("mixtral-8x7b", 46.7e9, 32 * 2 * 8 * 128),
    ],
)
def test_published_configs_are_read(name: str, size: float, elements_per_token: int, tmp_path: Path) -> None:
    """As published, without keys that mean nothing to a decoder (DeepSeek-V3: of its bfloat16 conversion)."""
    config = json.loads((Path(__file__).parent / "published_configs" / f"{name}.json").read_text())
    info = _describe(tmp_path, config)
    assert num_parameters(info) == pytest.approx(size, rel=0.01)
    shape = info.kv_shape
    assert info.num_layers * shape.num_planes * shape.num_heads * shape.head_dim == elements_per_token
