"""How fast one thread, or several, read memory on a CPU, which bounds a decode step: it reads all weights once. Called by benchmarks."""

from __future__ import annotations

import time

import torch

from pd_serve.engine.huge_pages import use_huge_pages
from pd_serve.engine.native.operators import Operators


def use_threads(num_threads: int) -> None:
    """Of the calling thread, for everything that it computes from now on."""
    torch.set_num_threads(num_threads)


class ReadProbe:
    """Reads a buffer as large as the weights and on pages like theirs, so that neither caches nor address look-ups help it more or less."""

    def __init__(self, nbytes: int, operators: Operators | None) -> None:
        """`operators`: compiled ones, whose read is faster than torch's on one thread."""
        self._operators = operators
        self._floats = torch.ones(max(1, nbytes // 256) * 64, dtype=torch.float32)
        use_huge_pages([(self._floats.data_ptr(), self._floats.nbytes)])
        self._words = self._floats.view(torch.int32)

    def seconds_per_byte(self) -> float:
        """By the faster of the ways, one pass over the buffer each. Take the least of several, spread over the run."""
        started_at = time.perf_counter()
        self._floats.sum()
        seconds = time.perf_counter() - started_at
        if self._operators is not None:
            started_at = time.perf_counter()
            self._operators.read(self._words)
            seconds = min(seconds, time.perf_counter() - started_at)
        return seconds / self._floats.nbytes
