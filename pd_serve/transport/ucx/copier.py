"""Copies of bytes that arrived in a message into the pool, wherever the pool lies."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pd_serve.errors import TransportError, TransportUnavailableError
from pd_serve.transport.native.ranges import range_copy
from pd_serve.transport.ucx.pinned import PinnedStaging, Staging


class Copier(Protocol):
    can_gather: bool
    """The pool can be read by this process's CPU, so several small pieces may be packed into one message."""

    def copy(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        """From host memory at `source` into the pool at `target`; done when it returns. `ranges` as of RangeCopy."""
        ...

    def open_staging(self, num_slots: int, slot_nbytes: int) -> Staging | None:
        """What the pool's bytes pass through on their way into messages, one writer's own; None where they can be sent as they lie."""
        ...


class HostCopier:
    can_gather = True

    def __init__(self) -> None:
        self._copy = range_copy()

    def copy(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        self._copy(target, source, ranges)

    def open_staging(self, num_slots: int, slot_nbytes: int) -> Staging | None:
        return None


class CudaCopier:
    """Through the CUDA driver, in the primary context of one device. Not run on hardware here."""

    can_gather = False

    def __init__(self, device_index: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportUnavailableError("a pool in GPU memory needs the CUDA driver (libcuda.so.1)") from error
        self._cuda.cuMemcpyHtoD_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._cuda.cuInit(0), "cuInit")
        self._check(self._cuda.cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
        self._check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        self._check(self._cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def copy(self, target: int, source: int, ranges: NDArray[np.int64]) -> None:
        for start, to, nbytes in ranges.tolist():
            self._check(self._cuda.cuMemcpyHtoD_v2(target + to, source + start, nbytes), "cuMemcpyHtoD")

    def open_staging(self, num_slots: int, slot_nbytes: int) -> Staging | None:
        return PinnedStaging(self._cuda, num_slots, slot_nbytes)

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result != 0:
            raise TransportError(f"CUDA: {what} returned {result}")


def copier_for(device: str) -> Copier:
    """`cpu`, `cuda` or `cuda:<index>`. Raises TransportUnavailableError, TransportError."""
    if device == "cpu":
        return HostCopier()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdigit():
        raise TransportError(f"a pool on device {device!r} cannot be registered")
    return CudaCopier(int(index or 0))
