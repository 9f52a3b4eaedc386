"""Sizes and routing of a mixture of experts. No torch; models/moe.py computes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    """How a token's router logits become the scores that experts are chosen by."""

    SOFTMAX = "softmax"
    SIGMOID_BIASED = "sigmoid"
    """Sigmoid; a bias per expert counts for the choice, not for the weight (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of tensors in a checkpoint, behind `model.layers.N.`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PLAIN_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True)
class ExpertsInfo:
    sparse_layers: tuple[int, ...]
    """The others have a plain gated MLP."""
    num_experts: int
    num_chosen: int
    """Experts per token."""
    intermediate_size: int
    """Of one expert."""
    shared_intermediate_size: int = 0
    """Of the expert that every token takes; 0: none."""
    scoring: Scoring = Scoring.SOFTMAX
    has_float32_router: bool = False
    """The router's product is in float32 whatever the model's type."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    """Experts outside a token's best groups are not chosen (arXiv:2405.04434, section 2.2.2)."""
    is_normalized: bool = False
    """A token's weights are divided by their sum."""
    scaling: float = 1.0
    """Of all weights."""
    names: ExpertNames = PLAIN_NAMES
