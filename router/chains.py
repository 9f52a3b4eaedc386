"""The digests of one prompt's full blocks (kv/prefix_chain.py), as far as somebody wants to know them. Used by prefixes.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from pd_serve.kv.prefix_chain import chain_digests

_key_of = struct.Struct("=Q").unpack_from
"""The first 8 bytes of a digest as a number, as memoryview.cast reads them."""


class AnyChain(Protocol):
    keys: list[int]
    """Short digests, of the first block first."""
    max_cached_blocks: int
    """One token at least is computed."""

    def extend(self) -> bool:
        """One digest more. False: there is none."""
        ...


class AnyChains(Protocol):
    def of(self, block_size: int) -> AnyChain: ...


class Chains:
    """By block size. Nothing is hashed before it is wanted, and nothing twice."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._token_ids = token_ids
        self._chains: dict[int, Chain] = {}

    def of(self, block_size: int) -> Chain:
        chain = self._chains.get(block_size)
        if chain is None:
            chain = self._chains[block_size] = Chain(self._token_ids, block_size)
        return chain


class Chain:
    """Hashed one by one."""

    def __init__(self, token_ids: tuple[int, ...], block_size: int) -> None:
        self.max_cached_blocks = max(0, len(token_ids) - 1) // block_size
        self.keys: list[int] = []
        self._digests = chain_digests(token_ids, block_size, 0, len(token_ids) // block_size)

    def extend(self) -> bool:
        digest = next(self._digests, None)
        if digest is None:
            return False
        self.keys.append(_key_of(digest)[0])
        return True


class GivenChain:
    """Digests that are given, for the one block size that all workers have."""

    def __init__(self, keys: Sequence[int], num_tokens: int) -> None:
        self.keys = list(keys)
        self.max_cached_blocks = 0
        self._num_tokens = num_tokens

    def of(self, block_size: int) -> GivenChain:
        self.max_cached_blocks = min(len(self.keys), max(0, self._num_tokens - 1) // block_size)
        return self

    def extend(self) -> bool:
        return False
