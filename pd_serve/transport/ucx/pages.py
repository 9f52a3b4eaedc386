"""Pages under shared mappings: made before they are needed, and large.

A pool of small pages lies scattered over physical memory, and a processor that walks page tables, twice over in a virtual machine, copies
into it at half to two thirds of the speed. Linux 6.1 and later make huge pages of shared memory on demand, whatever the system's setting
short of `deny`. Only a mapping whose address is a multiple of HUGE_NBYTES can use them as such.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from ctypes import c_char, c_int, c_long, c_size_t, c_void_p

HUGE_NBYTES = 2 * 1024 * 1024
COLLAPSE_NBYTES = 32 * 1024 * 1024
"""At a time."""
COLLAPSE_S = 0.4
"""Processor time at most: half a second for 1 GiB, several where a virtual machine has yet to get the memory. The rest stays small."""

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: make the pages writable at once, leaving what they hold."""
_MADV_COLLAPSE = 25
_PROT_NONE, _MAP_PRIVATE_ANONYMOUS, _MREMAP_MAYMOVE_FIXED = 0, 0x22, 3
_FAILED = 2**64 - 1


def populate(address: int, nbytes: int) -> bool:
    """Make all pages of a shared mapping writable without a fault. False where the system cannot: they fault one by one, then."""
    start = address & -mmap.PAGESIZE
    return _advise(start, address + nbytes - start, _MADV_POPULATE_WRITE)


def make_huge(address: int, nbytes: int) -> int:
    """Turn what can be turned of a new, empty shared mapping into huge pages. Returns the bytes that are in such, from the beginning."""
    end = address + nbytes // HUGE_NBYTES * HUGE_NBYTES
    if address % HUGE_NBYTES:
        return 0
    ends_at = time.thread_time() + COLLAPSE_S
    for start in range(address, end, COLLAPSE_NBYTES):
        size = min(COLLAPSE_NBYTES, end - start)
        for page in range(start, start + size, HUGE_NBYTES):
            c_char.from_address(page).value = b"\0"  # one small page in each: what has none is left alone
        if time.thread_time() >= ends_at or not _advise(start, size, _MADV_COLLAPSE):
            return start - address
    return end - address


def reserve(nbytes: int) -> int | None:
    """Addresses for `nbytes`, from a multiple of HUGE_NBYTES, that nothing else is mapped at until something is mapped over them or
    they are released."""
    libc = _libc()
    found: int = libc.mmap(None, nbytes + HUGE_NBYTES, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    if found == _FAILED:
        return None
    address, size = -(-found // HUGE_NBYTES) * HUGE_NBYTES, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for start, end in ((found, address), (address + size, found + -(-(nbytes + HUGE_NBYTES) // mmap.PAGESIZE) * mmap.PAGESIZE)):
        if end > start:
            libc.munmap(start, end - start)
    return address


def release(address: int, nbytes: int) -> None:
    """Unmap what reserve or map_again gave."""
    _libc().munmap(address, nbytes)


def map_again(address: int, nbytes: int) -> int | None:
    """Where the same pages of a shared mapping are mapped once more, at a multiple of HUGE_NBYTES. None where that cannot be."""
    reserved = reserve(nbytes) if address % mmap.PAGESIZE == 0 else None
    if reserved is None:
        return None
    # An old size of 0 leaves a shared mapping where it is and maps its pages once more: mremap(2).
    mapped: int = _libc().mremap(address, 0, nbytes, _MREMAP_MAYMOVE_FIXED, reserved)
    if mapped == _FAILED:
        release(reserved, nbytes)
        return None
    return mapped


def _advise(start: int, nbytes: int, advice: int) -> bool:
    result: int = _libc().madvise(start, nbytes, advice)
    return result == 0


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
    libc.munmap.argtypes = (c_void_p, c_size_t)
    libc.mmap.argtypes, libc.mmap.restype = (c_void_p, c_size_t, c_int, c_int, c_int, c_long), c_size_t
    libc.mremap.argtypes, libc.mremap.restype = (c_void_p, c_size_t, c_size_t, c_int, c_void_p), c_size_t
    return libc
