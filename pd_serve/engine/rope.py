"""Which rotary position embedding a model uses, read from its config. No torch; models/rotary.py computes with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from pd_serve.engine.config_json import ConfigJson
from pd_serve.errors import ModelError


class RopeType(Enum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeParams:
    theta: float
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_max_len: int = 0
    """Context of the model before it was extended, tokens."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Scales cosine and sine (yarn)."""
    is_truncated: bool = True
    """Yarn's ramp bounds are rounded to whole dimensions."""

    @classmethod
    def from_config(cls, config: ConfigJson, max_len: int) -> RopeParams:
        """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before). Raises ModelError for an unknown kind."""
        params = config.section("rope_parameters")
        if not params.values:
            params = config.section("rope_scaling")
        theta = params.number("rope_theta", config.number("rope_theta", 10000.0))
        name = params.text("rope_type", params.text("type", "default"))
        if name not in {kind.value for kind in RopeType}:
            raise ModelError(f"{config.path}: rotary scaling {name!r} is not supported")
        rope_type = RopeType(name)
        if rope_type is RopeType.DEFAULT:
            return cls(theta)
        factor = params.number("factor")
        return cls(
            theta=theta,
            rope_type=rope_type,
            factor=factor,
            original_max_len=params.integer("original_max_position_embeddings", max_len),
            low_freq_factor=params.number("low_freq_factor", 1.0),
            high_freq_factor=params.number("high_freq_factor", 4.0),
            beta_fast=params.number("beta_fast", 32.0),
            beta_slow=params.number("beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(params, factor) if rope_type is RopeType.YARN else 1.0,
            is_truncated=params.boolean("truncate", True),
        )


def _yarn_attention_factor(params: ConfigJson, factor: float) -> float:
    if params.has("attention_factor"):
        return params.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.has("mscale") and params.has("mscale_all_dim"):
        return mscale(params.number("mscale")) / mscale(params.number("mscale_all_dim"))
    return mscale(1.0)
