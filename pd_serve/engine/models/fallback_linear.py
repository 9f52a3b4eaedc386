"""Our linear layers in transformers' models: faster on CPU, and a row's result does not depend on how many others there are (linear.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pd_serve.engine.linear import Linear, LinearFactory


@dataclass(slots=True)
class RowCounts:
    """Of the step being computed; set by FallbackModel before each."""

    num_rows: int = 0
    num_decode_rows: int = 0


class _PackedLinear(nn.Module):
    def __init__(self, linear: Linear, counts: RowCounts, like: nn.Linear) -> None:
        super().__init__()
        self._linear = linear
        self._counts = counts
        self.in_features, self.out_features = like.in_features, like.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]. Rows other than the step's own, in number, are sampled ones or chosen by experts: such
        calls follow the rule for decode."""
        rows = x.reshape(-1, self.in_features)
        if not rows.shape[0]:
            return x.new_empty(*x.shape[:-1], self.out_features)
        counts = self._counts
        num_decode = counts.num_decode_rows if rows.shape[0] == counts.num_rows else rows.shape[0]
        return self._linear(rows, num_decode).view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, counts: RowCounts) -> None:
    """Replace every plain nn.Linear; its own weight is given up unless something else (tied embeddings) holds it.

    Modules derived from nn.Linear stay as they are.
    """
    factory = LinearFactory()
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                packed = _PackedLinear(factory.make(child.weight.detach(), bias), counts, child)
                setattr(owner, name, packed)
    factory.settle()
