"""A step that only decodes, through all layers by one call (native/decoder.py). Owned by the engine thread."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pd_serve.engine.attention.native import NativeAttention, NativePlan
from pd_serve.engine.kv_cache import PagedCache
from pd_serve.engine.linear import Linear
from pd_serve.engine.models.mlp import FeedForward, GatedMLP
from pd_serve.engine.models.norm import RMSNorm
from pd_serve.engine.native.decoder import DecoderParts, LayerParts, NativeDecoder
from pd_serve.engine.native.operators import Operators
from pd_serve.engine.step_inputs import StepInputs


class DenseLayer(Protocol):
    """As in models/llama.py."""

    @property
    def input_norm(self) -> RMSNorm: ...
    @property
    def qkv(self) -> Linear: ...
    @property
    def query_key_norm(self) -> RMSNorm | None: ...
    @property
    def output(self) -> Linear: ...
    @property
    def mlp_norm(self) -> RMSNorm: ...
    @property
    def mlp(self) -> FeedForward: ...


class NativeStep:
    """Gives a row the very bits that the operations one by one give it."""

    def __init__(self, operators: Operators, parts: DecoderParts, attention: NativeAttention) -> None:
        self._operators = operators
        self._parts = parts
        self._attention = attention
        self._decoder: tuple[PagedCache, NativeDecoder] | None = None

    def run_(self, hidden: Tensor, inputs: StepInputs, cache: PagedCache, plan: NativePlan) -> None:
        """Turn `hidden` [num_tokens, hidden_size], the tokens' embeddings, into what the last layer gives. Precondition:
        all of them are decode's."""
        if self._decoder is None or self._decoder[0] is not cache:
            slabs = [cache.layer(index).slab for index in range(cache.layout.num_layers)]
            self._decoder = cache, NativeDecoder(self._operators, self._parts, slabs)
        assert plan.decode is not None, "every row is of a decoding sequence"
        geometry = self._attention.pool_geometry(cache.layer(0))
        self._decoder[1].decode_(hidden, (inputs.positions, inputs.slots), geometry, plan.decode)


def layer_parts(layer: DenseLayer, window: int) -> LayerParts | None:
    """None for a layer that is not dense, or whose products the compiled operators do not compute."""
    mlp, head_norm = layer.mlp, layer.query_key_norm
    if not isinstance(mlp, GatedMLP):
        return None
    weights = [linear.native.weight for linear in (layer.qkv, layer.output, mlp.gate, mlp.up, mlp.down) if linear.native is not None]
    if len(weights) < 5:
        return None
    qkv, output, gate, up, down = weights
    return LayerParts(
        input_norm=layer.input_norm.scaled_weight,
        qkv=qkv,
        head_norm=None if head_norm is None else head_norm.scaled_weight,
        output=output,
        mlp_norm=layer.mlp_norm.scaled_weight,
        gate=gate,
        up=up,
        down=down,
        window=window,
    )
