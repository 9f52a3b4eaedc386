"""How a prefix is named: a chain of digests, one per full block. Pure; used by the pool of a worker and by the router, which must agree.

    digest of block i = blake2b(digest of block i-1, tokens of block i)

so equal digests mean equal tokens from position 0, and a block is found without comparing tokens. 16 bytes: a collision among
2**40 blocks has probability below 2**-47. Routers hear the first 8 bytes of each: there a collision costs a detour, not an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

ROOT = b"\x00" * 16
SHORT_NBYTES = 8
"""Of a digest, on the wire."""
_INT_NBYTES = 4
_PIECE_TOKENS = 256
"""Tokens that are packed together: most prompts are followed for a block or two only."""


def chain_digests(token_ids: Sequence[int], block_size: int, first: int, end: int, parent: bytes = ROOT) -> Iterator[bytes]:
    """Digests of blocks first .. end - 1 of a sequence, lazily; `parent` is that of block first - 1. Precondition: the blocks are full."""
    step = block_size * _INT_NBYTES
    num_blocks = max(1, _PIECE_TOKENS // block_size)
    for begin in range(first, end, num_blocks):
        data = array("i", token_ids[begin * block_size : min(end, begin + num_blocks) * block_size]).tobytes()
        for offset in range(0, len(data), step):
            parent = blake2b(parent + data[offset : offset + step], digest_size=16).digest()
            yield parent
