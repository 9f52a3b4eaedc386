"""What a layer does between its matrix products: norms, turning heads and writing KV.

    TorchGlue     by torch's operators, on any device
    NativeGlue    by compiled ones, on CPU (native_glue.py)

Both round alike, so that a prompt's KV is the same bits whichever computed it. Every result is of its own row: it must not depend on how
many rows there are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable, rotate_
from pd_serve.engine.native.operators import Operators
from pd_serve.engine.step_inputs import StepInputs


class Placement(Protocol):
    def __call__(self, index: int, heads: Tensor) -> None:
        """Of layer `index`: turn the queries and keys among `heads` [num_rows, num_heads + 2 * num_kv_heads, head_dim] by their tokens'
        angles, in place, and write keys and values to the cache."""
        ...


class Glue(Protocol):
    def norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """norm(hidden) of `hidden` [num_rows, hidden_size], contiguous."""
        ...

    def norm_heads_(self, heads: Tensor, norm: RMSNorm) -> None:
        """Normalize each of `heads` [num_rows, num_heads, head_dim], in place; `norm` has a weight per head."""
        ...

    def placement(self, inputs: StepInputs, rotary: RotaryTable, cache: PagedCache, num_heads: int) -> Placement:
        """For all layers of a step. `num_heads`: query heads."""
        ...


def glue_for(operators: Operators | None) -> Glue:
    if operators is None:
        return TorchGlue()
    from pd_serve.engine.models.native_glue import NativeGlue

    return NativeGlue(operators)


class TorchGlue:
    def norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        return norm(hidden)

    def norm_heads_(self, heads: Tensor, norm: RMSNorm) -> None:
        heads.copy_(norm(heads))

    def placement(self, inputs: StepInputs, rotary: RotaryTable, cache: PagedCache, num_heads: int) -> Placement:
        cosine, signed_sine = rotary.at(inputs.positions)
        rows, num_rotated = cache.rows(inputs.slots), num_heads + cache.layout.num_kv_heads

        def place(index: int, heads: Tensor) -> None:
            rotate_(heads[:, :num_rotated], cosine, signed_sine)
            cache.write(index, rows, heads[:, num_heads:])

        return place
