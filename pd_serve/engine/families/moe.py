"""Qwen3-MoE and Mixtral: the decoder of models/llama.py with a mixture of experts (models/moe.py) in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.experts_info import ExpertNames, ExpertsInfo
from pd_serve.engine.families.llama import LlamaTraits, read_common
from pd_serve.engine.model_info import ModelInfo
from pd_serve.errors import ModelError


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError for what is missing, malformed or not honoured."""
    traits, read_experts = _READERS[architecture]
    experts = read_experts(config)
    check_experts(config, experts)
    return replace(read_common(config, architecture, traits), experts=experts)


def check_experts(config: ConfigJson, experts: ExpertsInfo) -> None:
    """Raises ModelError where the counts do not fit each other."""
    if not 0 < experts.num_chosen <= experts.num_experts:
        raise ModelError(f"{config.path}: {experts.num_chosen} experts per token of {experts.num_experts}")
    if experts.num_experts % experts.num_groups or not 0 < experts.num_chosen_groups <= experts.num_groups:
        raise ModelError(
            f"{config.path}: {experts.num_experts} experts in {experts.num_groups} groups, of which {experts.num_chosen_groups} are chosen"
        )


def _qwen3(config: ConfigJson) -> ExpertsInfo:
    # Every decoder_sparse_step-th layer, unless it is listed as plain.
    step, plain = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    layers = range(config.integer("num_hidden_layers"))
    return ExpertsInfo(
        sparse_layers=tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in plain),
        # transformers 5 writes the second name.
        num_experts=config.integer("num_experts") if config.has("num_experts") else config.integer("num_local_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        is_normalized=config.boolean("norm_topk_prob", False),
    )


def _mixtral(config: ConfigJson) -> ExpertsInfo:
    return ExpertsInfo(
        sparse_layers=tuple(range(config.integer("num_hidden_layers"))),
        num_experts=config.integer("num_local_experts"),
        num_chosen=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        is_normalized=True,
        names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )


_READERS: Mapping[str, tuple[LlamaTraits, Callable[[ConfigJson], ExpertsInfo]]] = {
    "Qwen3MoeForCausalLM": (LlamaTraits(has_qk_norm=True), _qwen3),
    "MixtralForCausalLM": (LlamaTraits(qkv_bias=False, output_bias=False), _mixtral),
}
ARCHITECTURES = tuple(_READERS)
