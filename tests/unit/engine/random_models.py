"""Random checkpoints of any architecture that the engine builds: it is asked which tensors it wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pd_serve.engine.families.registry import describe
from pd_serve.engine.models.registry import build_model
from pd_serve.engine.models.settings import BuildSettings
from pd_serve.engine.parallel import SingleRank
from pd_serve.engine.weights import Part
from tests.unit.engine.model_folders import write_config

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False, "hidden_size": 64}
EXPERTS: dict[str, Any] = {**SIZES, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "llama-biased": {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {**SIZES, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**SIZES, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mistral": {**SIZES, "architectures": ["MistralForCausalLM"], "sliding_window": 20},
    "two-kv-heads": {**SIZES, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2},
    "one-kv-head": {**SIZES, "num_key_value_heads": 1},
    "nine-heads": {**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 96},
    "gemma3": {**SIZES, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 20, "sliding_window_pattern": 2},
    "phi3": {**SIZES, "architectures": ["Phi3ForCausalLM"]},
    "mixtral": {**EXPERTS, "architectures": ["MixtralForCausalLM"], "num_local_experts": 5},
    "qwen3-moe": {**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "norm_topk_prob": True, "head_dim": 16},
    "deepseek-v2": {**LATENT, "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "routed_scaling_factor": 1.7},
    "deepseek-v3": {**LATENT, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2, "attention_bias": True},
}


def write_random_model(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """TINY_CONFIG with `changes`; every tensor random, biases and norms too: at 0 and 1 they would hide a mistake."""
    write_config(folder, **changes)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(tensor_shapes(folder).items()):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = noise * 0.2 + 1.0 if "norm" in name else noise * 0.3
    save_file(tensors, folder / "model.safetensors")
    return folder


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the model whose config.json lies in `folder`: every tensor that the engine asks for."""
    wanted = _Wanted()
    build_model(describe(folder, has_weights=False), wanted, BuildSettings(16, 64, torch.float32, torch.device("cpu"), SingleRank()))
    return wanted.shapes


class _Wanted:
    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        self.shapes[name] = shape
        whole = torch.zeros(shape)
        return whole if part is None else whole[part.slices()]
