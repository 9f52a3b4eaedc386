"""How fast one thread, or several, read memory on a CPU, which bounds a decode step: it reads all weights once. Called by benchmarks."""

from __future__ import annotations

import time

import torch


def use_threads(num_threads: int) -> None:
    """Of the calling thread, for everything that it computes from now on."""
    torch.set_num_threads(num_threads)


class ReadProbe:
    """Reads a buffer as large as the weights, so that caches help it neither more nor less than them."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.ones(max(1, nbytes // 4), dtype=torch.float32)

    def seconds_per_byte(self) -> float:
        """By one pass over the buffer. Take the least of several, spread over the run."""
        started_at = time.perf_counter()
        self._buffer.sum()
        return (time.perf_counter() - started_at) / self._buffer.nbytes
