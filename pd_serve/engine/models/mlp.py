"""The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202). gate and up are one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.parallel_shares import Share
from pd_serve.engine.weights import Part, WeightSource


class FeedForward(Protocol):
    def __call__(self, x: Tensor, num_decode_rows: int) -> Tensor:
        """[num_rows, hidden_size] to the same shape, row by row; the first `num_decode_rows` are decode's (linear.py)."""
        ...


@dataclass(frozen=True, slots=True)
class MlpShape:
    hidden_size: int
    intermediate_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """See FeedForward."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor, num_decode_rows: int) -> Tensor:
        gate, up = self.gate_up(x, num_decode_rows).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), num_decode_rows)


def load_mlp(weights: WeightSource, linears: LinearFactory, share: Share, shape: MlpShape, names: tuple[str, str, str]) -> GatedMLP:
    """The rank's share of the intermediate elements: the ranks' results are summed, so that only one of them adds the last bias.

    `names` of the gate, up and down matrices, without `.weight`. Raises ModelError.
    """
    gate, up, down = names
    outer, inner, own = shape.hidden_size, shape.intermediate_size, share.of(shape.intermediate_size)
    gate_up = torch.cat([weights.get(f"{name}.weight", (inner, outer), Part(0, own)) for name in (gate, up)])
    gate_up_bias = torch.cat([weights.get(f"{name}.bias", (inner,), Part(0, own)) for name in (gate, up)]) if shape.has_bias else None
    down_weight = weights.get(f"{down}.weight", (outer, inner), Part(1, own))
    down_bias = weights.get(f"{down}.bias", (outer,)) if shape.has_bias and share.is_first else None
    return GatedMLP(linears.make(gate_up, gate_up_bias), linears.make(down_weight, down_bias))
