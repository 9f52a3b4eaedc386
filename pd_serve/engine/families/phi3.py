"""Phi-3 (arXiv:2404.14219): Llama's decoder with q, k and v stored as one matrix, and gate and up as another (models/phi3.py)."""

from __future__ import annotations

from pd_serve.engine.config_json import ConfigJson
from pd_serve.engine.families.llama import LlamaTraits, read_common
from pd_serve.engine.model_info import ModelInfo
from pd_serve.errors import ModelError

ARCHITECTURES = ("Phi3ForCausalLM",)


def describe(config: ConfigJson, architecture: str) -> ModelInfo:
    """Raises ModelError for what is missing, malformed or not honoured: longrope, whose angles depend on the length of the context, so that
    what is cached would change its meaning as a sequence grows."""
    for key in ("rope_parameters", "rope_scaling"):
        section = config.section(key)
        # Earlier releases said `su` and `yarn` for the same thing.
        if section.text("rope_type", section.text("type", "default")) in {"longrope", "su", "yarn"}:
            raise ModelError(f"{config.path}: rotary scaling 'longrope' is not supported")
    return read_common(config, architecture, LlamaTraits(qkv_bias=False, output_bias=False))
