"""Pinned host memory that KV passes through on its way from a pool in GPU memory into messages. NOT YET RUN ON A GPU.

Used by one writer on the transport thread. Many small pieces become one message, and the device copies at its full speed, which it does
from and to pinned memory only. Whoever sends has seen to it that the pieces are written (LayerEvents.wait): copies run on a stream of their
own beside compute.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from typing import Protocol

from pd_serve.errors import TransportError


class Staging(Protocol):
    """Slots of host memory, each for the pieces of one message."""

    slot_nbytes: int

    def take(self) -> int | None:
        """Address of a free slot; None: all are on their way."""
        ...

    def gather(self, slot: int, pieces: Iterable[tuple[int, int]]) -> int:
        """Copy pieces (address, length in bytes) of the pool into the slot, one behind the other; done when it returns. Bytes copied."""
        ...

    def give_back(self, slot: int) -> None: ...


class PinnedStaging:
    """See Staging. Its memory and stream live until nobody knows it any more: messages that are on their way keep it as they keep other
    buffers. The pool's context must be current on the calling thread (CudaCopier)."""

    def __init__(self, cuda: ctypes.CDLL, num_slots: int, slot_nbytes: int) -> None:
        """Raises TransportError where the driver gives no memory."""
        self.slot_nbytes = slot_nbytes
        self._cuda = cuda
        cuda.cuMemcpyDtoHAsync_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        cuda.cuMemHostAlloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint)
        cuda.cuMemFreeHost.argtypes = (ctypes.c_void_p,)
        cuda.cuStreamSynchronize.argtypes = cuda.cuStreamDestroy_v2.argtypes = (ctypes.c_void_p,)
        memory, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuMemHostAlloc(ctypes.byref(memory), num_slots * slot_nbytes, 0), "cuMemHostAlloc")
        # 1: it does not wait for the default stream.
        _check(cuda.cuStreamCreate(ctypes.byref(self._stream), 1), "cuStreamCreate")
        assert memory.value is not None
        weakref.finalize(self, _release, cuda, memory.value, self._stream)
        self._free = [memory.value + index * slot_nbytes for index in reversed(range(num_slots))]

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def gather(self, slot: int, pieces: Iterable[tuple[int, int]]) -> int:
        copied = 0
        for address, nbytes in pieces:
            _check(self._cuda.cuMemcpyDtoHAsync_v2(slot + copied, address, nbytes, self._stream), "cuMemcpyDtoHAsync")
            copied += nbytes
        _check(self._cuda.cuStreamSynchronize(self._stream), "cuStreamSynchronize")
        return copied

    def give_back(self, slot: int) -> None:
        self._free.append(slot)


def _release(cuda: ctypes.CDLL, memory: int, stream: ctypes.c_void_p) -> None:
    cuda.cuStreamDestroy_v2(stream)
    cuda.cuMemFreeHost(memory)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise TransportError(f"CUDA: {what} returned {result}")
