"""The geometry of KV memory: the one place that knows where a token's keys and values lie. Pure arithmetic, no torch.

The pool is one region, a slab per layer, a slab is blocks, a block is planes: keys and values, or the one latent of MLA.

    slab of layer l = [num_blocks, num_planes, plane]
    plane           = [block_size, num_kv_heads, head_dim]   token-major (the default)
                      [num_kv_heads, block_size, head_dim]   head-major
    fp8: behind the elements of a plane, their scales: [block_size, num_kv_heads] (or [num_kv_heads, block_size]), a byte each

so a full block of a layer is one contiguous range, and a run of consecutive blocks is one larger range. Within a block the bytes of
successive tokens lie one behind the other in each *segment*: one per plane, in head-major order one per plane and head, and as many again
for scales. Called by the block pool, the transfer planner, the engine's cache and the join check.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class KVDtype(Enum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"
    """8-bit floats with a power of two per token and head as their scale: a block of the OCP Microscaling formats (v1.0, section 5) whose
    size is head_dim. A scale of its own for every token keeps what is stored independent of chunks and batches."""

    @property
    def nbytes(self) -> int:
        """Of one element."""
        return {KVDtype.FLOAT32: 4, KVDtype.FP8_E4M3: 1}.get(self, 2)

    @property
    def has_scales(self) -> bool:
        return self is KVDtype.FP8_E4M3


class KVOrder(Enum):
    """How the elements of a plane are ordered."""

    TOKEN_MAJOR = "token_major"
    HEAD_MAJOR = "head_major"


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Equally spaced bytes of a block's successive tokens."""

    offset: int
    """Of the first token's bytes, from the start of the block."""
    stride: int
    """Bytes from one token to the next."""
    nbytes: int
    """Bytes of each token: as many as the stride unless only some heads are meant."""


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Geometry of one rank's KV pool. All offsets are bytes from the start of the pool region."""

    num_layers: int
    num_kv_heads: int
    """Held by this rank."""
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: KVDtype
    num_planes: int = 2
    """Keys and values; 1: the latent of MLA, one head of kv_lora_rank + qk_rope_head_dim."""
    order: KVOrder = KVOrder.TOKEN_MAJOR

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys (or values, or latent) in one layer, scales included."""
        return self.num_kv_heads * (self.head_dim * self.dtype.nbytes + self.dtype.has_scales)

    @property
    def plane_nbytes(self) -> int:
        """Bytes of a block's keys (or values, or latents) in one layer."""
        return self.block_size * self.token_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in one layer, all planes."""
        return self.num_planes * self.plane_nbytes

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
        return self.num_planes * self.num_layers * self.token_nbytes

    def block_offset(self, layer: int, block: int) -> int:
        return layer * self.layer_nbytes + block * self.block_nbytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def segments(self, heads: range | None = None) -> tuple[Segment, ...]:
        """Of a block, plane by plane: elements, then scales. `heads`: of these heads of the rank only, consecutive ones."""
        chosen = range(self.num_kv_heads) if heads is None else heads
        if not (0 <= chosen.start < chosen.stop <= self.num_kv_heads and chosen.step == 1):
            raise ValueError(f"{chosen} are not heads of {self.num_kv_heads}")
        widths = [self.head_dim * self.dtype.nbytes, 1] if self.dtype.has_scales else [self.head_dim * self.dtype.nbytes]
        segments: list[Segment] = []
        base = 0
        for _ in range(self.num_planes):
            for width in widths:
                if self.order is KVOrder.TOKEN_MAJOR:
                    stride = self.num_kv_heads * width
                    segments.append(Segment(base + chosen.start * width, stride, len(chosen) * width))
                else:
                    segments += [Segment(base + head * self.block_size * width, width, width) for head in chosen]
                base += self.block_size * self.num_kv_heads * width
        return tuple(segments)

    def is_same_as(self, other: KVLayout) -> bool:
        """KV goes from one to the other as it lies (num_blocks may differ)."""
        return msgspec.structs.replace(self, num_blocks=0) == msgspec.structs.replace(other, num_blocks=0)

    def can_become(self, other: KVLayout) -> bool:
        """KV of the same model, rank for rank: only block size, order and dtype differ, which a transfer converts."""
        return (self.num_layers, self.head_dim, self.num_planes) == (other.num_layers, other.head_dim, other.num_planes)
