"""The pool that peers write into, and beside it a scratch area that only the probe at join is written to.

Host memory that UCX allocated in shared memory is the one kind that another process on this host can write into without this one's help;
memory that was only registered is written by checked messages on that lane. Owned by the transport; unmapped by `close`, after which the
buffer of the region must not be touched.
"""

from __future__ import annotations

import ctypes
import logging
import mmap

from pd_serve.errors import TransportError
from pd_serve.transport.base import Region
from pd_serve.transport.ucx.copier import Copier, HostCopier, copier_for
from pd_serve.transport.ucx.lanes import Lane
from pd_serve.transport.ucx.messages import MemoryOffer
from pd_serve.transport.ucx.pages import make_huge, populate
from pd_serve.transport.ucx.ports import Ports
from pd_serve.transport.ucx.seam import Memory

PAGE_NBYTES = 4096

logger = logging.getLogger(__name__)


class Pool:
    """Made by `allocate` or `register`."""

    def __init__(self, region: Region, scratch_address: int, scratch_nbytes: int, device: str) -> None:
        self.region = region
        self.device = device
        self.scratch_address = scratch_address
        self.scratch_nbytes = scratch_nbytes
        self.copier: Copier = copier_for(device)
        self.scratch_copier = HostCopier()
        self._pool_memory: dict[Lane, Memory] = {}
        self._scratch_memory: dict[Lane, Memory] = {}
        self._pool_keys: dict[Lane, bytes] = {}
        self._scratch_keys: dict[Lane, bytes] = {}
        self._backing: list[mmap.mmap] = []

    @staticmethod
    def allocate(ports: Ports, nbytes: int, scratch_nbytes: int) -> Pool:
        """Pool and scratch in one allocation: in shared memory where that lane is on and the system has room, else anonymous."""
        scratch_offset = _round_up(nbytes)
        total = scratch_offset + _round_up(scratch_nbytes)
        shm = ports.get(Lane.SHM)
        shared: Memory | None = None
        if shm is not None:
            try:
                shared = shm.context.allocate(total)
            except TransportError as error:
                logger.warning("no shared memory for a pool of %d bytes (see /dev/shm): local peers write by messages: %s", total, error)
        backing = None if shared is not None else mmap.mmap(-1, total)
        address = shared.address if shared is not None else ctypes.addressof(ctypes.c_char.from_buffer(_require(backing)))
        buffer = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        pool = Pool(Region(1, address, nbytes, buffer), address + scratch_offset, scratch_nbytes, "cpu")
        if backing is not None:
            pool._backing.append(backing)
        if shared is not None:
            pool._adopt(Lane.SHM, shared, shared)
            num_huge = make_huge(address, total)
            populate(address + num_huge, total - num_huge)
        if (rdma := ports.get(Lane.RDMA)) is not None:
            memory = rdma.context.register(address, total)
            pool._adopt(Lane.RDMA, memory, memory)
        return pool

    @staticmethod
    def register(ports: Ports, region: Region, device: str, scratch_nbytes: int) -> Pool:
        """The caller's memory. On the host it is one-sided over RDMA only; in a GPU over RDMA and, on one host, cuda_ipc (not run here)."""
        scratch = mmap.mmap(-1, _round_up(scratch_nbytes))
        scratch_address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
        pool = Pool(region, scratch_address, scratch_nbytes, device)
        pool._backing.append(scratch)
        lanes = [Lane.RDMA, Lane.SHM] if device.startswith("cuda") else [Lane.RDMA]
        for lane in lanes:
            port = ports.get(lane)
            if port is None:
                continue
            memory = port.context.register(region.address, region.nbytes)
            scratch_memory = (
                port.context.allocate(scratch_nbytes) if lane is Lane.SHM else port.context.register(scratch_address, scratch_nbytes)
            )
            pool._adopt(lane, memory, scratch_memory)
        return pool

    def memory_on(self, lane: Lane) -> Memory | None:
        return self._pool_memory.get(lane)

    def scratch_on(self, lane: Lane) -> tuple[int, Memory | None]:
        """Address and memory of the scratch area as a source of puts on a lane."""
        memory = self._scratch_memory.get(lane)
        if memory is None or memory is self._pool_memory.get(lane):
            return self.scratch_address, memory
        return memory.address, memory

    def is_one_sided_on(self, lane: Lane) -> bool:
        return lane in self._pool_keys

    def pool_offer(self, lane: Lane) -> MemoryOffer:
        return MemoryOffer(self.region.address, self.region.nbytes, self._pool_keys.get(lane, b""))

    def scratch_offer(self, lane: Lane) -> MemoryOffer:
        address, _ = self.scratch_on(lane)
        return MemoryOffer(address, self.scratch_nbytes, self._scratch_keys.get(lane, b""))

    def close(self) -> None:
        memories = {id(memory): memory for memory in (*self._pool_memory.values(), *self._scratch_memory.values())}
        for memory in memories.values():
            memory.close()
        self._pool_memory.clear()
        self._scratch_memory.clear()
        self._backing.clear()

    def _adopt(self, lane: Lane, pool: Memory, scratch: Memory) -> None:
        self._pool_memory[lane] = pool
        self._scratch_memory[lane] = scratch
        self._pool_keys[lane] = pool.pack_key()
        self._scratch_keys[lane] = scratch.pack_key()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def _require(backing: mmap.mmap | None) -> mmap.mmap:
    assert backing is not None
    return backing
