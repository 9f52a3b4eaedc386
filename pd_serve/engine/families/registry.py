"""What config.json says about a model, checked: everything the engine needs to build it, and a refusal by name of what it cannot honour.

Called by the loader and, before any weight is read, by the worker that sizes its pool. No torch here. One file per family beside this one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pd_serve.engine.checkpoint import Checkpoint
from pd_serve.engine.config_json import ConfigJson, read_json
from pd_serve.engine.families import deepseek, fallback, gemma3, llama, moe, phi3
from pd_serve.engine.model_info import ModelInfo
from pd_serve.errors import ModelError

_FAMILIES: Mapping[str, Callable[[ConfigJson, str], ModelInfo]] = {
    **dict.fromkeys(llama.ARCHITECTURES, llama.describe),
    **dict.fromkeys(moe.ARCHITECTURES, moe.describe),
    **dict.fromkeys(deepseek.ARCHITECTURES, deepseek.describe),
    **dict.fromkeys(gemma3.ARCHITECTURES, gemma3.describe),
    **dict.fromkeys(phi3.ARCHITECTURES, phi3.describe),
}
"""By architecture: reads config.json, without end tokens and fingerprint."""


def describe(path: Path, *, has_weights: bool = True) -> ModelInfo:
    """Read and check the folder's config and safetensors headers, not the weights. `has_weights` False: config.json alone is enough.

    Raises ModelError, one line: no such folder, unknown architecture, a feature that is not honoured, a missing or damaged shard.
    """
    config = read_json(path / "config.json")
    architecture = _architecture(config)
    _refuse_quantized(config)
    info = _FAMILIES.get(architecture, fallback.describe)(config, architecture)
    return replace(
        info,
        eos_token_ids=_eos_token_ids(path, config),
        fingerprint=Checkpoint.open(path).fingerprint() if has_weights else _config_fingerprint(config),
    )


def describe_config(config: ConfigJson) -> ModelInfo | None:
    """What config.json alone says of an architecture that has a file here, whether its weights are quantized or not, without end tokens and
    fingerprint; None for another architecture. Raises ModelError as describe does."""
    return next((_FAMILIES[name](config, name) for name in config.texts("architectures") if name in _FAMILIES), None)


def _architecture(config: ConfigJson) -> str:
    names = config.texts("architectures")
    for name in names:
        if name in _FAMILIES:
            return name
    for name in names:
        if fallback.is_known(name):
            return name
    shown = ", ".join(names) or "none named"
    own = ", ".join(_FAMILIES)
    raise ModelError(f"{config.path}: architecture not supported ({shown}); supported: {own}, and other …ForCausalLM of transformers")


def _refuse_quantized(config: ConfigJson) -> None:
    if config.has("quantization_config"):
        method = config.section("quantization_config").text("quant_method", "unnamed")
        raise ModelError(f"{config.path}: quantized weights ({method}) are not supported")


def _eos_token_ids(path: Path, config: ConfigJson) -> tuple[int, ...]:
    """Generation stops where generation_config.json says, else where config.json says: as transformers does."""
    generation = path / "generation_config.json"
    if generation.is_file():
        ids = read_json(generation).integers("eos_token_id")
        if ids:
            return ids
    return config.integers("eos_token_id")


def _config_fingerprint(config: ConfigJson) -> str:
    canonical = json.dumps(config.values, sort_keys=True).encode()
    return "random-" + hashlib.sha256(canonical).hexdigest()[:32]
