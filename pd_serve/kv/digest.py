"""A digest of KV that its writer and its target can compare, whatever way it went (`transport.verify`).

Every byte of a token's KV has a place that does not depend on blocks, order or pieces: its layer, its token, and in the token's bytes plane
by plane its elements, then its scales, head by head, as the target's layout has them. Bytes at successive places make 8-byte words, and

    digest = sum over words of (word, bytes that are not meant zero) * key(layer, token, index of the word)         mod 2^64

so a writer adds up what it sends as it sends it, packed or straight from its pool, and the target what lies in its own blocks; digests of
tokens or heads that do not overlap add up to that of both. Keys are odd: a change within one word never goes unnoticed, and any other,
such as a token in another's place, with a chance of about 2^-64. Nothing here withstands somebody who wants it to match.

Used by the transport thread, for host memory only; costs a read of the bytes, which is why it is off by default.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pd_serve.kv.conversion import Packing
from pd_serve.kv.layout import KVLayout, KVOrder

DIGEST_NBYTES = 8

_WORD = 8
_MOST = 32 * 1024
"""Bytes looked at together: they and their keys stay in the cache."""
_LAYER_BITS = 40
"""Bits of a word's index within a layer."""


class TokenSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start_token, end_token) of a sequence, and the pool's blocks that hold them."""

    blocks: tuple[int, ...]
    """From logical block 0."""
    start_token: int
    end_token: int


class KVDigest:
    """A running sum."""

    def __init__(self) -> None:
        self._sum = 0

    def add_pool(self, memory: NDArray[np.uint8], layout: KVLayout, span: TokenSpan, layer: int, heads: range | None = None) -> None:
        """Tokens as they lie in the pool of `layout` at the beginning of `memory` [nbytes]; `heads`: of these only, consecutive ones."""
        if span.start_token >= span.end_token:
            return
        heads = range(layout.num_kv_heads) if heads is None else heads
        size = layout.block_size
        first = span.start_token // size
        chosen = list(span.blocks[first : (span.end_token - 1) // size + 1])
        base = layout.block_offset(layer, 0)
        blocks = memory[base : base + layout.layer_nbytes].reshape(layout.num_blocks, -1)[chosen]
        past = span.end_token - first * size
        for segment, place in zip(layout.segments(heads), _places(layout, heads), strict=True):
            shape, strides = (len(chosen), size, segment.nbytes), (layout.block_nbytes, segment.stride, 1)
            rows = as_strided(blocks[:, segment.offset :], shape, strides, writeable=False).reshape(-1, segment.nbytes)
            self._add(rows[span.start_token - first * size : past], layout, layer, span.start_token, place)

    def add_packed(self, packed: NDArray[np.uint8], packing: Packing, layer: int) -> None:
        """`packed` [packing.nbytes]: what was packed of a layer."""
        heads = packing.heads.dst
        at = 0
        for segment, place in zip(packing.dst.segments(heads), _places(packing.dst, heads), strict=True):
            past = at + packing.num_tokens * segment.nbytes
            self._add(packed[at:past].reshape(-1, segment.nbytes), packing.dst, layer, packing.start_token, place)
            at = past

    def to_bytes(self) -> bytes:
        return self._sum.to_bytes(DIGEST_NBYTES, "little")

    def _add(self, rows: NDArray[np.uint8], layout: KVLayout, layer: int, first_token: int, place: int) -> None:
        """`rows` [num_tokens, nbytes] of successive tokens, each at `place` of its token's bytes."""
        nbytes = rows.shape[1]
        words_per_token = -(-layout.num_planes * layout.token_nbytes // _WORD)
        lead = place % _WORD
        num_words = -(-(lead + nbytes) // _WORD)
        step = max(1, _MOST // (num_words * _WORD))
        indices = np.arange(num_words) + (place // _WORD + (layer << _LAYER_BITS))
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            padded = np.zeros((len(some), num_words * _WORD), np.uint8)
            padded[:, lead : lead + nbytes] = some
            tokens = np.arange(first_token + first, first_token + first + len(some))
            keys = _keys((tokens[:, None] * words_per_token + indices).astype(np.uint64))
            self._sum = (self._sum + int((padded.view("<u8") * keys).sum(dtype=np.uint64))) % 2**64


def digest_of_pool(memory: NDArray[np.uint8], layout: KVLayout, span: TokenSpan) -> bytes:
    """Of all layers and heads."""
    digest = KVDigest()
    for layer in range(layout.num_layers):
        digest.add_pool(memory, layout, span, layer)
    return digest.to_bytes()


def _places(layout: KVLayout, heads: range) -> list[int]:
    """Of layout.segments(heads), each in the bytes of its token."""
    widths = [layout.head_dim * layout.dtype.nbytes, 1] if layout.dtype.has_scales else [layout.head_dim * layout.dtype.nbytes]
    places: list[int] = []
    base = 0
    for _ in range(layout.num_planes):
        for width in widths:
            starts = heads[:1] if layout.order is KVOrder.TOKEN_MAJOR else heads
            places += [base + head * width for head in starts]
            base += layout.num_kv_heads * width
    return places


def _keys(indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Odd, and otherwise without pattern: SplitMix64's output function (Steele, Lea, Flood 2014)."""
    mixed = (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: NDArray[np.uint64] = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return keys
