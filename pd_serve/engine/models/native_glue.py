"""The glue of a layer by compiled operators. Owned by the engine thread."""

from __future__ import annotations

from torch import Tensor

from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.models.glue import Placement
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.models.rotary import RotaryTable
from pd_serve.engine.native.operators import Operators, geometry_of
from pd_serve.engine.step_inputs import StepInputs


class NativeGlue:
    """For pools whose elements are of the engine's type."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def norm(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        return self._operators.norm(hidden, norm.scaled_weight, norm.floor)

    def norm_heads_(self, heads: Tensor, norm: RMSNorm) -> None:
        self._operators.norm_heads_(heads, norm.scaled_weight, norm.floor)

    def placement(self, inputs: StepInputs, rotary: RotaryTable, cache: PagedCache, num_heads: int) -> Placement:
        slabs = [cache.layer(index).slab for index in range(cache.layout.num_layers)]
        geometry = geometry_of(slabs[0], num_heads, 1.0)
        turns, tokens = (rotary.cosine, rotary.signed_sine), (inputs.positions, inputs.slots)

        def place(index: int, heads: Tensor) -> None:
            self._operators.rotate_and_write(geometry, heads, turns, tokens, slabs[index])

        return place
