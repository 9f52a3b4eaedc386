"""The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pd_serve.engine.linear import Linear, LinearFactory
from pd_serve.engine.native.operators import Fusion
from pd_serve.engine.parallel_shares import Share
from pd_serve.engine.weights import Part, WeightSource


class FeedForward(Protocol):
    def __call__(self, x: Tensor, num_decode_rows: int, residual: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] to the same shape, row by row, plus `residual` of that shape; the first `num_decode_rows` are decode's
        (linear.py)."""
        ...


@dataclass(frozen=True, slots=True)
class MlpShape:
    hidden_size: int
    intermediate_size: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """See FeedForward. Each operation is fused with the product before it."""

    gate: Linear
    """With silu."""
    up: Linear
    """Times the gate."""
    down: Linear

    def __call__(self, x: Tensor, num_decode_rows: int, residual: Tensor | None = None) -> Tensor:
        inner = self.up(x, num_decode_rows, self.gate(x, num_decode_rows))
        return self.down(inner, num_decode_rows, residual)


def load_mlp(weights: WeightSource, linears: LinearFactory, share: Share, shape: MlpShape, names: tuple[str, str, str]) -> GatedMLP:
    """The rank's share of the intermediate elements: the ranks' results are summed, so that only one of them adds the last bias.

    `names` of the gate, up and down matrices, without `.weight`. Raises ModelError.
    """
    outer, inner, own = shape.hidden_size, shape.intermediate_size, share.of(shape.intermediate_size)
    down = names[2]

    def split(name: str, fusion: Fusion) -> Linear:
        bias = weights.get(f"{name}.bias", (inner,), Part(0, own)) if shape.has_bias else None
        return linears.make(weights.get(f"{name}.weight", (inner, outer), Part(0, own)), bias, fusion)

    down_weight = weights.get(f"{down}.weight", (outer, inner), Part(1, own))
    down_bias = weights.get(f"{down}.bias", (outer,)) if shape.has_bias and share.is_first else None
    return GatedMLP(split(names[0], Fusion.SILU), split(names[1], Fusion.TIMES), linears.make(down_weight, down_bias))
