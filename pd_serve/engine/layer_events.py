"""When a layer's KV is in GPU memory. The engine thread records, the transport thread asks. NOT YET RUN ON A GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LayerEvents:
    """One CUDA event per layer, recorded anew in every step: an answer speaks of the last recording, so it is never too early."""

    def __init__(self, num_layers: int) -> None:
        self._events = tuple(torch.cuda.Event() for _ in range(num_layers))  # type: ignore[no-untyped-call]

    def recording(self, on_layer: Callable[[int], None]) -> Callable[[int], None]:
        """A hook that records the layer's event on the current stream before it calls `on_layer`."""

        def hook(layer: int) -> None:
            self._events[layer].record()
            on_layer(layer)

        return hook

    def is_written(self, layer: int) -> bool:
        return bool(self._events[layer].query())  # type: ignore[no-untyped-call]

    def wait(self, layer: int) -> None:
        """Block the calling thread until the layer's KV is written (at most the step that computes it)."""
        self._events[layer].synchronize()
