"""Tiny random checkpoints of each architecture, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(rope_type: str, **fields: float) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **fields}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=256)
_LINEAR = _rope("linear", factor=2.0)

_GEMMA3: dict[str, Any] = {
    **SIZES,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 40,
    "sliding_window": 33,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}

TINY_MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-tied-biased": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "tie_word_embeddings": True}, attention_bias=True, mlp_bias=True)
    ),
    "llama-llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=_LLAMA3)),
    "llama-linear-rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=_LINEAR)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters=_YARN)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=70)),
    "qwen2-window": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=48, max_window_layers=1)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "phi3-window": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, sliding_window=90)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA3)),
    "gemma3-softcap": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**{**_GEMMA3, "tie_word_embeddings": False}, final_logit_softcapping=3.0, attention_bias=True)
    ),
    "mistral-mha": lambda: MistralForCausalLM(MistralConfig(**{**SIZES, "num_key_value_heads": 4}, sliding_window=4096)),
}


def save_tiny_model(name: str, folder: Path) -> PreTrainedModel:
    """Every parameter random, biases and norms too (transformers leaves those at 0 and 1, where they would hide a mistake)."""
    torch.manual_seed(7)
    model = TINY_MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model
