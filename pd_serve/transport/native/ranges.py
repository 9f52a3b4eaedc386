"""Copying many ranges of host memory, compiled where there is a compiler. Used by the transport thread.

A copy of at most LOCKED_NBYTES keeps the interpreter's lock, a longer one gives it up.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import CDLL, PyDLL, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import PdServeError
from pd_serve.transport.native.build import build_library, find_compiler

LOCKED_NBYTES = 64 * 1024
"""Beside a thread that computes in Python, 200 copies of 6 KiB took 0.2 ms at the median either way, but one batch in ten waited 10 ms (two
switch intervals) for the lock when each copy gave it away."""

logger = logging.getLogger(__name__)


class RangeCopy(Protocol):
    def __call__(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        """Copy from and to host memory at these addresses. `ranges` [n, 3], contiguous: offset at the source, at the target, bytes.

        What was copied is visible to other processors before anything that this thread stores afterwards. Targets must not overlap.
        """
        ...


class CompiledRangeCopy:
    def __init__(self, library: Path) -> None:
        """Raises OSError where the library cannot be loaded."""
        self._locked, self._unlocked = PyDLL(str(library)).pd_copy_ranges, CDLL(str(library)).pd_copy_ranges
        for function in (self._locked, self._unlocked):
            function.argtypes, function.restype = (c_void_p, c_void_p, c_void_p, c_int64), None

    def __call__(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        assert ranges.flags.c_contiguous
        copy = self._locked if int(ranges[:, 2].sum()) <= LOCKED_NBYTES else self._unlocked
        copy(target, source, ranges.ctypes.data, len(ranges))


class PlainRangeCopy:
    """Range by range through the C library."""

    def __init__(self) -> None:
        self._locked = PyDLL(None).memmove
        self._locked.argtypes, self._locked.restype = (c_void_p, c_void_p, ctypes.c_size_t), c_void_p

    def __call__(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        for start, to, nbytes in ranges.tolist():
            copy = self._locked if nbytes <= LOCKED_NBYTES else ctypes.memmove
            copy(target + to, source + start, nbytes)


@cache
def range_copy() -> RangeCopy:
    """The best there is on this machine; compiled at the first call where it has to be."""
    compiler = find_compiler()
    if compiler is None:
        logger.info("no C compiler (cc, gcc, clang): bytes are copied by the C library")
        return PlainRangeCopy()
    try:
        return CompiledRangeCopy(build_library(compiler))
    except (PdServeError, OSError) as error:
        logger.info("bytes are copied by the C library: %s", error)
        return PlainRangeCopy()
