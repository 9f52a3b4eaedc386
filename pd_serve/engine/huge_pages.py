"""Puts memory that is read again and again onto huge pages: without them a processor, a virtual one above all, looks up addresses about as
long as it reads (measured in a virtual machine: one thread reads twice as fast with them).

By madvise(MADV_COLLAPSE), Linux 6.1 and later, which does not ask for the system's setting (/sys/kernel/mm/transparent_hugepage). Where
the kernel refuses, pages stay as they are. Contents and addresses do not change. Called by the engine thread when weights have been loaded.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

PAGE_NBYTES = 2 << 20
"""Of a huge page on x86-64, and on ARM with small pages of 4 KiB."""
_MADV_COLLAPSE = 25
_LEAST_NBYTES = 32 << 20
"""Less than this stays in the caches, or is not worth the copy."""
_MAPS = Path("/proc/self/maps")
_ANONYMOUS = ("", "[heap]")

Range = tuple[int, int]
"""[start, end) of addresses."""


def use_huge_pages(parts: Iterable[Range]) -> int:
    """Of the `parts` (address, nbytes) together; returns the bytes that now lie on huge pages. Takes about a second for 250 MB."""
    ranges = [(address, address + nbytes) for address, nbytes in parts]
    if sum(end - start for start, end in ranges) < _LEAST_NBYTES:
        return 0
    try:
        mappings = list(anonymous_mappings(_MAPS.read_text(encoding="utf-8")))
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    nbytes = 0
    for start, end in whole_pages(ranges, mappings):
        if madvise(start, end - start, _MADV_COLLAPSE) == 0:
            nbytes += end - start
            continue
        # The kernel stops at some obstacles: what lies behind them is tried page by page.
        nbytes += PAGE_NBYTES * sum(madvise(page, PAGE_NBYTES, _MADV_COLLAPSE) == 0 for page in range(start, end, PAGE_NBYTES))
    _log.info("%d MiB lie on huge pages", nbytes >> 20)
    return nbytes


def anonymous_mappings(maps: str) -> Iterator[Range]:
    """The process's own writable memory, as in `maps` (proc_pid_maps(5)), by address."""
    for line in maps.splitlines():
        addresses, rights, _offset, _device, _inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and "".join(name) in _ANONYMOUS:
            start, _, end = addresses.partition("-")
            yield int(start, 16), int(end, 16)


def whole_pages(ranges: Iterable[Range], mappings: Iterable[Range]) -> list[Range]:
    """Runs of huge pages, each run within one mapping, that hold some of `ranges`."""
    own, index = sorted(mappings), 0
    runs: list[Range] = []
    is_new = True
    for number in sorted({page for start, end in ranges for page in range(start // PAGE_NBYTES, -(-end // PAGE_NBYTES))}):
        start, end = number * PAGE_NBYTES, (number + 1) * PAGE_NBYTES
        while index < len(own) and own[index][1] < end:
            index += 1
            is_new = True
        if index == len(own) or own[index][0] > start:
            continue
        if runs and not is_new and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
        is_new = False
    return runs
