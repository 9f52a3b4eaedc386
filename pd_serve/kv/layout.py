"""The geometry of KV memory: the one place that knows where a token's keys and values lie. Pure arithmetic, no torch.

The pool is one region, a slab per layer. Token-major (the default and the only order that is pushed without packing):

    slab of layer l = [num_blocks, 2, block_size, num_kv_heads, head_dim]     (2: keys, then values)

so a full block of a layer is one contiguous range, a run of consecutive blocks is one larger range, and a range of tokens inside a block is
two (its keys, its values). Called by the block pool, the transfer planner, the engine's cache and the join check.
"""

from __future__ import annotations

import hashlib
from enum import Enum

import msgspec


class KVDtype(Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def nbytes(self) -> int:
        return 4 if self is KVDtype.FLOAT32 else 2


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometry of one rank's KV pool. All offsets are bytes from the start of the pool region."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: KVDtype

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * self.dtype.nbytes

    @property
    def half_block_nbytes(self) -> int:
        """Bytes of a block's keys (or values) in one layer."""
        return self.block_size * self.token_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.half_block_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's slab: the stride between the same block of two successive layers."""
        return self.num_blocks * self.block_nbytes

    @property
    def pool_nbytes(self) -> int:
        return self.num_layers * self.layer_nbytes

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.num_layers * self.token_nbytes

    def block_offset(self, layer: int, block: int) -> int:
        return layer * self.layer_nbytes + block * self.block_nbytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fingerprint(self, model_fingerprint: str) -> str:
        """Two workers whose fingerprints are equal can exchange KV without conversion (num_blocks may differ)."""
        fields = (self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.dtype.value, model_fingerprint)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]
