"""Tiny random checkpoints with experts, and with latent attention, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 211,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "routed_scaling_factor": 1.7,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_EXPERTS = {**_SIZES, "num_key_value_heads": 2, "num_experts_per_tok": 3}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}


def _v2(**changes: Any) -> PreTrainedModel:
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**_LATENT, **changes}))


def _v3(**changes: Any) -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**_LATENT, **_GROUPS, **changes}))


LATENT_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "v2-greedy": lambda: _v2(q_lora_rank=None),
    "v2-groups-yarn": lambda: _v2(**_GROUPS, topk_method="group_limited_greedy", rope_parameters=_YARN),
    "v3": lambda: _v3(),
    "v3-yarn-biased": lambda: _v3(rope_parameters=_YARN, attention_bias=True, norm_topk_prob=False),
    "v3-plain-queries-halves": lambda: _v3(q_lora_rank=None, rope_interleave=False, n_group=1, topk_group=1),
}
EXPERT_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_EXPERTS, num_experts=8, moe_intermediate_size=32, norm_topk_prob=True, head_dim=32)
    ),
    "qwen3-moe-mixed-layers": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_EXPERTS, num_experts=8, moe_intermediate_size=32, decoder_sparse_step=2, mlp_only_layers=[2])
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_EXPERTS, num_local_experts=5, sliding_window=None)),
}
SPARSE_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {**LATENT_MODELS, **EXPERT_MODELS}


def save_sparse_model(name: str, folder: Path) -> PreTrainedModel:
    """Every parameter random, biases (those of the router, too) and norms as well, and the experts' weights large enough to matter."""
    torch.manual_seed(11)
    model = SPARSE_MODELS[name]().eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("bias"):
                tensor.normal_(0.0, 0.2)
            elif "norm" in key:
                tensor.uniform_(0.5, 1.5)
            elif "mlp.gate.weight" in key or "experts" in key:
                tensor.normal_(0.0, 0.2)
    model.save_pretrained(folder, max_shard_size="200KB")
    return model
