"""Which published block holds which prefix: a chain of digests, one per full block. Pure; owned by the BlockPool.

    digest of block i = blake2b(digest of block i-1, tokens of block i)

so equal digests mean equal tokens from position 0, and a block is found without comparing tokens. 16 bytes: a collision among
2**40 blocks has probability below 2**-47.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_ROOT = b"\x00" * 16
_INT_NBYTES = 4


class PrefixIndex:
    """Digest -> published block, and block -> digest. At most one block per digest: the first writer wins."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_by_digest: dict[bytes, int] = {}
        self._digest_by_block: dict[int, bytes] = {}
        """Of every block whose content is known, also of duplicates that lost the race: the chain goes on from them."""

    def __len__(self) -> int:
        """Number of published blocks."""
        return len(self._block_by_digest)

    def find(self, token_ids: Sequence[int], max_blocks: int) -> tuple[int, ...]:
        """Published blocks of the longest known prefix, at most `max_blocks`. Hashes one block beyond the hit, no more."""
        blocks: list[int] = []
        for digest in self._digests(token_ids, _ROOT, 0, max_blocks):
            block = self._block_by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def add(self, token_ids: Sequence[int], blocks: Sequence[int], num_full: int) -> None:
        """Publish the first `num_full` of a sequence's blocks. Only blocks not seen before are hashed."""
        first = num_full
        while first > 0 and blocks[first - 1] not in self._digest_by_block:
            first -= 1
        if first == num_full:
            return
        parent = self._digest_by_block[blocks[first - 1]] if first > 0 else _ROOT
        for index, digest in enumerate(self._digests(token_ids, parent, first, num_full), start=first):
            self._digest_by_block[blocks[index]] = digest
            self._block_by_digest.setdefault(digest, blocks[index])

    def is_published(self, block: int) -> bool:
        digest = self._digest_by_block.get(block)
        return digest is not None and self._block_by_digest.get(digest) == block

    def forget(self, block: int) -> None:
        """The block is about to get other content. Unknown blocks are ignored."""
        digest = self._digest_by_block.pop(block, None)
        if digest is not None and self._block_by_digest.get(digest) == block:
            del self._block_by_digest[digest]

    def _digests(self, token_ids: Sequence[int], parent: bytes, first: int, end: int) -> Iterator[bytes]:
        """Digests of blocks first .. end - 1 of the sequence, lazily."""
        size = self._block_size
        data = array("i", token_ids[first * size : end * size]).tobytes()
        step = size * _INT_NBYTES
        for offset in range(0, len(data), step):
            parent = blake2b(parent + data[offset : offset + step], digest_size=16).digest()
            yield parent
