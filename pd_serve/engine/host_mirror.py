"""A tensor in device memory and its twin in host memory, pinned where the device is a GPU: filled on the host, sent as one copy.

Owned by the engine thread. The next step must not overwrite the host's side while the last step's copy may still read it: `open` waits for
that copy, which has long ended where a step's tokens were sampled in between.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostMirror:
    """The device's side keeps its place, so that captured work may read it."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Both sides are [size] and zero."""
        is_cuda = device.type == "cuda"
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self._host = torch.zeros(size, dtype=dtype, pin_memory=is_cuda)
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def open(self) -> Tensor:
        """The host's side, free to be written."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._host

    def send(self, count: int) -> None:
        """Copy the first `count` elements to the device, in order with what the current stream does."""
        self.device[:count].copy_(self._host[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
