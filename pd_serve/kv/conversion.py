"""What a transfer between layouts that differ packs and where the packed bytes go: pure arithmetic. The packing itself is the engine's.

The packed form of some tokens of one layer is the target's, without its blocks: for every segment of a target block (layout.py) the bytes
of all those tokens, one token behind the other.

    packed = segment 0 [num_tokens, nbytes], segment 1 [num_tokens, nbytes], ...        of the heads that go to the target

so whatever the two block sizes, a target block's share of a segment is one contiguous range of it, and of the target too, unless only some
of a target token's heads are written in token-major order: then each token is a range of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from pd_serve.kv.layout import KVLayout
from pd_serve.kv.transfer import coalesce, token_ranges


class HeadSlice(msgspec.Struct, frozen=True, array_like=True):
    """The heads that one rank sends to another, as indices of each side's own heads."""

    src_start: int
    dst_start: int
    num_heads: int

    @property
    def src(self) -> range:
        return range(self.src_start, self.src_start + self.num_heads)

    @property
    def dst(self) -> range:
        return range(self.dst_start, self.dst_start + self.num_heads)


class Packing(msgspec.Struct, frozen=True):
    """Tokens [start_token, end_token) of a sequence on their way from a pool of layout `src` to one of layout `dst`, in any layer."""

    src: KVLayout
    dst: KVLayout
    heads: HeadSlice
    src_blocks: tuple[int, ...]
    """Block table from logical block 0."""
    start_token: int
    end_token: int
    ranges: NDArray[np.int64]
    """[n, 3]: (offset in the packed bytes, offset in layer 0 of the target's pool, nbytes), coalesced."""

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.start_token

    @property
    def nbytes(self) -> int:
        """Of the packed bytes of one layer."""
        return self.num_tokens * packed_token_nbytes(self.dst, self.heads.num_heads)


def packed_token_nbytes(dst: KVLayout, num_heads: int) -> int:
    """Packed bytes of one token in one layer."""
    return sum(segment.nbytes for segment in dst.segments(range(num_heads)))


def plan_packings(
    src: KVLayout,
    dst: KVLayout,
    heads: HeadSlice,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    start_token: int,
    end_token: int,
    max_nbytes: int,
) -> Iterator[Packing]:
    """Packings of at most `max_nbytes` each (of one token at least), cut where target blocks begin if that many bytes hold one.

    Raises ValueError for layouts that no conversion joins, or tokens beyond a block table.
    """
    if not src.can_become(dst):
        raise ValueError(f"KV of layout {src} cannot become {dst}")
    per_token = packed_token_nbytes(dst, heads.num_heads)
    most = max(1, max_nbytes // per_token)
    step = most // dst.block_size * dst.block_size or most
    first = start_token
    while first < end_token:
        past = min(end_token, first // step * step + step)
        yield Packing(src, dst, heads, tuple(src_blocks), first, past, _ranges(dst, heads, dst_blocks, first, past))
        first = past


def _ranges(dst: KVLayout, heads: HeadSlice, dst_blocks: Sequence[int], start_token: int, end_token: int) -> NDArray[np.int64]:
    """Packed bytes to target, segment by segment, so that neighbours coalesce."""
    num_tokens, size = end_token - start_token, dst.block_size
    remote = token_ranges(dst, dst_blocks, start_token, end_token, heads.dst)
    parts: list[NDArray[np.int64]] = []
    segments = dst.segments(heads.dst)
    logical = np.arange(start_token // size, (end_token - 1) // size + 1, dtype=np.int64)
    first = np.maximum(logical * size, start_token) - start_token
    counts = np.minimum((logical + 1) * size, end_token) - start_token - first
    if any(segment.nbytes != segment.stride for segment in segments):
        # token_ranges: block by block, in it segment by segment, in it token by token.
        block_of = np.repeat(np.arange(len(logical)), counts * len(segments))
        segment_of = np.concatenate([np.repeat(np.arange(len(segments)), count) for count in counts])
        token_of = np.concatenate([np.tile(np.arange(count), len(segments)) for count in counts]) + first[block_of]
    else:
        segment_of = np.tile(np.arange(len(segments)), len(logical))
        token_of = np.repeat(first, len(segments))
    base = 0
    for index, segment in enumerate(segments):
        chosen = segment_of == index
        local = base + token_of[chosen] * segment.nbytes
        parts.append(np.column_stack((local, remote[chosen])))
        base += num_tokens * segment.nbytes
    return coalesce(np.concatenate(parts))
