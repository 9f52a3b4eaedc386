"""Which published block holds which prefix, by the digests of prefix_chain.py. Pure; owned by the BlockPool.

While somebody listens, what is published and what is forgotten is noted, and only as a difference: a digest that came and went between two
looks is not in it. So the notes are never longer than what was published before and what is now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_serve.kv.prefix_chain import ROOT, chain_digests


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Digests since the last look. None is in both."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class PrefixIndex:
    """Digest -> published block, and block -> digest. At most one block per digest: the first writer wins."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._block_by_digest: dict[bytes, int] = {}
        self._digest_by_block: dict[int, bytes] = {}
        """Of every block whose content is known, also of duplicates that lost the race: the chain goes on from them."""
        self._changes: dict[bytes, bool] | None = None
        """Whether each was stored; None: nobody listens."""

    def __len__(self) -> int:
        """Number of published blocks."""
        return len(self._block_by_digest)

    def find(self, token_ids: Sequence[int], max_blocks: int) -> tuple[int, ...]:
        """Published blocks of the longest known prefix, at most `max_blocks`. Hashes one block beyond the hit, no more."""
        blocks: list[int] = []
        for digest in chain_digests(token_ids, self._block_size, 0, max_blocks):
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
        parent = self._digest_by_block[blocks[first - 1]] if first > 0 else ROOT
        for index, digest in enumerate(chain_digests(token_ids, self._block_size, first, num_full, parent), start=first):
            self._digest_by_block[blocks[index]] = digest
            if digest not in self._block_by_digest:
                self._block_by_digest[digest] = blocks[index]
                self._note(digest, True)

    def is_published(self, block: int) -> bool:
        digest = self._digest_by_block.get(block)
        return digest is not None and self._block_by_digest.get(digest) == block

    def forget(self, block: int) -> None:
        """The block is about to get other content. Unknown blocks are ignored."""
        digest = self._digest_by_block.pop(block, None)
        if digest is not None and self._block_by_digest.get(digest) == block:
            del self._block_by_digest[digest]
            self._note(digest, False)

    # ---- for those who follow

    def listen(self, is_listening: bool) -> None:
        """Begin or cease to note changes; what was noted is dropped."""
        self._changes = {} if is_listening else None

    def take_changes(self) -> PrefixChanges:
        """What has changed since the last call, or since listen(True)."""
        changes = self._changes
        if not changes:
            return PrefixChanges()
        self._changes = {}
        stored = tuple(digest for digest, is_stored in changes.items() if is_stored)
        return PrefixChanges(stored, tuple(digest for digest, is_stored in changes.items() if not is_stored))

    def digests(self) -> tuple[bytes, ...]:
        """Of all published blocks."""
        return tuple(self._block_by_digest)

    def still_published(self, digests: Iterable[bytes]) -> list[bytes]:
        return [digest for digest in digests if digest in self._block_by_digest]

    def _note(self, digest: bytes, is_stored: bool) -> None:
        changes = self._changes
        if changes is not None and changes.pop(digest, None) is None:
            changes[digest] = is_stored
