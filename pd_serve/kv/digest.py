"""A digest of KV bytes that two workers can compare: what was pushed against what arrived (`transport.verify`).

Canonical: layer by layer, logical block by logical block, keys then values, so it does not depend on which physical blocks hold the tokens.
Called by the machines on the control thread, for host memory only; costs a read of the bytes, which is why it is off by default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from pd_serve.kv.layout import KVLayout

DIGEST_NBYTES = 16

KVDigest = Callable[[Sequence[int], int, int], bytes]
"""(blocks from logical block 0, start token, end token) -> digest of the KV of tokens [start, end)."""


class HostKVDigest:
    """Digests of a pool in host memory."""

    def __init__(self, layout: KVLayout, pool: memoryview) -> None:
        self._layout = layout
        self._pool = pool.cast("B") if pool.format != "B" else pool

    def __call__(self, blocks: Sequence[int], start_token: int, end_token: int) -> bytes:
        layout = self._layout
        digest = hashlib.blake2b(digest_size=DIGEST_NBYTES)
        block_size, token_nbytes, half = layout.block_size, layout.token_nbytes, layout.plane_nbytes
        for layer in range(layout.num_layers):
            for index in range(start_token // block_size, layout.num_blocks_for(end_token)):
                first = max(start_token - index * block_size, 0) * token_nbytes
                last = min(end_token - index * block_size, block_size) * token_nbytes
                base = layout.block_offset(layer, blocks[index])
                digest.update(self._pool[base + first : base + last])
                digest.update(self._pool[base + half + first : base + half + last])
        return digest.digest()
