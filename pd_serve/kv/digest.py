"""A digest of KV bytes by where they lie at the target: what was written against what is there (`transport.verify`).

    digest = sum over 8-byte words of the target's pool of (word, its other bytes zero) * key(its index)        mod 2^64

A sum does not ask in which pieces, in which order or from where the bytes came: a writer adds up what it puts as it puts it, packed or not,
and the target the ranges that were to be written; digests of ranges that do not overlap add up to that of both. Keys are odd, so a change
within one word never goes unnoticed, and any other with a chance of about 2^-64. Nothing here withstands somebody who wants it to match.

Used by the transport thread, for host memory only; costs a read of the bytes, which is why it is off by default.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIGEST_NBYTES = 8

_WORD = 8
_MOST = 32 * 1024
"""Bytes looked at together: they and their keys stay in the cache."""
_FEW = 256
"""Bytes below which ranges are gathered by an index instead of one by one."""


class KVDigest:
    """A running sum."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """`memory` [nbytes]: where the bytes are read."""
        self._memory = memory
        self._sum = 0

    def add(self, ranges: NDArray[np.int64]) -> None:
        """`ranges` [n, 3]: (offset in memory, offset in the target's pool, nbytes), as in WriteBatch.ops."""
        self._sum = (self._sum + _sum_of(self._memory, ranges)) % 2**64

    def to_bytes(self) -> bytes:
        return self._sum.to_bytes(DIGEST_NBYTES, "little")


def digest_in_place(memory: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> bytes:
    """Of the ranges [start, end) of the target's own pool."""
    digest = KVDigest(memory)
    digest.add(np.column_stack((starts, starts, ends - starts)))
    return digest.to_bytes()


def _sum_of(memory: NDArray[np.uint8], ranges: NDArray[np.int64]) -> int:
    ranges = _split(ranges[ranges[:, 2] > 0])
    kinds, kind_of = np.unique(np.column_stack((ranges[:, 1] % _WORD, ranges[:, 2])), axis=0, return_inverse=True)
    total = 0
    for index, (lead, nbytes) in enumerate(kinds.tolist()):
        alike = ranges[kind_of.ravel() == index]
        num_words = (lead + nbytes + _WORD - 1) // _WORD
        step = max(1, _MOST // (num_words * _WORD))
        for first in range(0, len(alike), step):
            some = alike[first : first + step]
            padded = np.zeros((len(some), num_words * _WORD), np.uint8)
            if nbytes < _FEW:
                padded[:, lead : lead + nbytes] = memory[some[:, :1] + np.arange(nbytes)]
            else:
                for row, offset in zip(padded, some[:, 0].tolist(), strict=True):
                    row[lead : lead + nbytes] = memory[offset : offset + nbytes]
            keys = _keys((some[:, 1:2] // _WORD + np.arange(num_words)).astype(np.uint64))
            total += int((padded.view("<u8") * keys).sum(dtype=np.uint64))
    return total


def _split(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same bytes in ranges of at most _MOST."""
    counts = -(-ranges[:, 2] // _MOST)
    parts = np.repeat(ranges, counts, axis=0)
    shift = _MOST * (np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts))
    return np.column_stack((parts[:, 0] + shift, parts[:, 1] + shift, np.minimum(_MOST, parts[:, 2] - shift)))


def _keys(indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Odd, and otherwise without pattern: SplitMix64's output function (Steele, Lea, Flood 2014)."""
    mixed = (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return keys
