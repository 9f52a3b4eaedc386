"""What a worker tells others of its model. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from enum import Enum
from pathlib import Path

from pd_serve.engine.model_info import ModelInfo
from pd_serve.engine.rope import RopeParams
from pd_serve.protocol.identity import ModelIdentity

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def identify(name: str, path: Path, info: ModelInfo) -> ModelIdentity:
    """Of the model in a folder."""
    files = [path / file for file in _TOKENIZERS if (path / file).is_file()]
    tokenizer = hashlib.sha256(files[0].read_bytes()).hexdigest()[:12] if files else ""
    return ModelIdentity(name, info.vocab_size, tokenizer, describe_rope(info.rope))


def describe_rope(rope: RopeParams) -> str:
    """Kind, theta, and what differs from the defaults."""
    default = RopeParams(rope.theta)
    values = {field.name: getattr(rope, field.name) for field in fields(rope)}
    changed = {name: value for name, value in values.items() if value != getattr(default, name) and not isinstance(value, Enum)}
    return " ".join([rope.rope_type.value, f"theta={rope.theta:g}", *(f"{name}={value:g}" for name, value in changed.items())])
