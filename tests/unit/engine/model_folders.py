"""Model folders made by hand: a config, and safetensors where a test needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

TINY_CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def write_config(folder: Path, **changes: object) -> Path:
    """A change to None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**TINY_CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_checkpoint(folder: Path, *, num_shards: int = 1, seed: int = 0, **changes: object) -> Path:
    """Random weights for a Llama of TINY_CONFIG, in one file or in shards with an index."""
    write_config(folder, **changes)
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (32,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (size, 32) for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 32))}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (32, 64)
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        own = names[shard::num_shards]
        save_file({name: tensors[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
