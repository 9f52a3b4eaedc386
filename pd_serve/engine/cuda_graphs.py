"""Capturing on CUDA. NOT YET RUN ON A GPU.

Called on the engine thread; other threads may use the device meanwhile (capture is of this thread's work alone).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_NUM_WARM_UPS = 2
"""Runs before capture: libraries choose their kernels and take their workspaces in the first."""


class CudaCapturer:
    """See graphs.Capturer. Its graphs share one memory pool: one of them runs at a time, and what it hands out lies outside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph
