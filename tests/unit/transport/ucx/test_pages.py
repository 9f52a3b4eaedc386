"""Pages of shared mappings: made ahead, made huge where the system does that, mapped once more where they can be used."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from pd_serve.transport.ucx.pages import HUGE_NBYTES, make_huge, map_again, populate, release, reserve


class Shared:
    """A shared mapping of four huge pages, and a bit, at a multiple of HUGE_NBYTES or of the small page."""

    def __init__(self, is_aligned: bool = True) -> None:
        self.nbytes = 4 * HUGE_NBYTES + mmap.PAGESIZE
        self.backing = mmap.mmap(-1, self.nbytes)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.backing))
        mapped = map_again(first, self.nbytes) if is_aligned else first
        assert mapped is not None
        self.address = mapped


def huge_kib(address: int) -> int:
    """Of the mapping that begins there, as the kernel tells."""
    text = Path("/proc/self/smaps").read_text(encoding="ascii").partition(f"\n{address:08x}-")[2]
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1])


def test_populating_keeps_what_the_pages_hold_and_tells_where_there_are_none() -> None:
    backing = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    backing[:3] = b"kv!"
    address = ctypes.addressof(ctypes.c_char.from_buffer(backing))
    if not populate(address + 1, 4 * mmap.PAGESIZE):
        pytest.skip("no MADV_POPULATE_WRITE on this kernel")
    assert backing[:3] == b"kv!"
    assert not populate(mmap.PAGESIZE, mmap.PAGESIZE)


def test_pages_mapped_again_are_the_same_pages() -> None:
    shared = Shared()
    assert shared.address % HUGE_NBYTES == 0
    ctypes.memmove(shared.address + HUGE_NBYTES, b"kv!", 3)
    assert shared.backing[HUGE_NBYTES : HUGE_NBYTES + 3] == b"kv!"
    release(shared.address, shared.nbytes)
    assert shared.backing[HUGE_NBYTES : HUGE_NBYTES + 3] == b"kv!"


def test_private_memory_and_parts_of_pages_are_not_mapped_again() -> None:
    private = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(private))
    assert map_again(address, len(private)) is None
    assert map_again(address + 8, 8) is None


def test_what_was_made_huge_is_empty_and_told_from_the_beginning() -> None:
    shared = Shared()
    nbytes = make_huge(shared.address, shared.nbytes)
    if nbytes == 0:
        pytest.skip("no huge pages of shared memory on this system")
    assert nbytes % HUGE_NBYTES == 0
    assert huge_kib(shared.address) * 1024 == nbytes
    assert not shared.backing[:].strip(b"\0")
    release(shared.address, shared.nbytes)


def test_what_begins_inside_a_huge_page_is_left_alone() -> None:
    shared = Shared()
    assert make_huge(shared.address + mmap.PAGESIZE, shared.nbytes - mmap.PAGESIZE) == 0
    assert huge_kib(shared.address) == 0
    release(shared.address, shared.nbytes)


def test_a_reservation_lies_at_a_huge_page() -> None:
    address = reserve(HUGE_NBYTES + 1)
    assert address is not None
    assert address % HUGE_NBYTES == 0
    release(address, HUGE_NBYTES + 1)
