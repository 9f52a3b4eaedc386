"""Copying scattered blocks side by side, into memory that is reused by every layer and step: fresh pages cost more than the copy.

The buffer holds the keys of all gathered sequences, then their values:  [num_planes, num_blocks, block_size, num_kv_heads, head_dim].
Latents (MLA) are one plane, which is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_serve.engine.attention.base import AttentionGeometry, QuerySpan
from pd_serve.engine.kv_cache import KVLayer


@dataclass(frozen=True, slots=True)
class Gather:
    """One gather of a step, run once per layer."""

    sources: Tensor
    """Planes of blocks to copy (KVLayer.gather)."""
    target: Tensor
    """[num_gathered_planes, plane_width]"""
    target_rows: Tensor
    """The same memory by token, [num_planes * num_gathered_tokens, num_kv_heads * head_dim]."""
    blank_rows: Tensor
    """Those of them that lie beyond their sequence."""

    def run(self, layer: KVLayer) -> None:
        layer.gather(self.sources, self.target)
        if self.blank_rows.shape[0]:
            self.target_rows.index_fill_(0, self.blank_rows, 0.0)


class GatherBuffer:
    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype) -> None:
        self._geometry = geometry
        self._num_planes = geometry.num_planes
        self._row_width = geometry.num_kv_heads * geometry.head_dim
        self.plane_width = geometry.block_size * self._row_width
        self._memory = torch.empty(0, dtype=dtype)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._geometry.block_size)

    def reserve(self, num_blocks: int) -> None:
        """Make room; grows by doubling. Views made before stay on the old memory."""
        needed = self._num_planes * num_blocks * self.plane_width
        if self._memory.numel() < needed:
            self._memory = torch.empty(max(needed, 2 * self._memory.numel()), dtype=self._memory.dtype)

    def gather(self, spans: Sequence[QuerySpan], padded_lens: Sequence[int]) -> Gather:
        """Of each span's blocks, padded to as many as its padded length takes (with block 0, whose copy is blanked)."""
        tables: list[NDArray[np.int64]] = []
        blanks: list[NDArray[np.int64]] = []
        first_row = 0
        for span, padded_len in zip(spans, padded_lens, strict=True):
            used = self.num_blocks_for(span.context_len)
            table = np.zeros(self.num_blocks_for(padded_len), dtype=np.int64)
            table[:used] = span.block_table[:used]
            tables.append(table)
            blanks.append(np.arange(first_row + span.context_len, first_row + padded_len))
            first_row += len(table) * self._geometry.block_size
        blocks, blank = np.concatenate(tables), np.concatenate(blanks)
        target = self._memory[: self._num_planes * len(blocks) * self.plane_width].view(-1, self.plane_width)
        return Gather(
            sources=torch.from_numpy(np.concatenate([self._num_planes * blocks + plane for plane in range(self._num_planes)])),
            target=target,
            target_rows=target.view(-1, self._row_width),
            blank_rows=torch.from_numpy(np.concatenate([blank + plane * first_row for plane in range(self._num_planes)])),
        )

    def views(self, first_block: int, num_sequences: int, padded_len: int, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences of equal padded length, whose blocks begin at `first_block` of a gather of `num_blocks`.

        Each [num_sequences, num_kv_heads, padded_len, head_dim].
        """
        geometry = self._geometry
        memory = self._memory[: self._num_planes * num_blocks * self.plane_width].view(self._num_planes, num_blocks, -1)
        own = memory[:, first_block : first_block + num_sequences * self.num_blocks_for(padded_len)]
        shape = (num_sequences, -1, geometry.num_kv_heads, geometry.head_dim)
        planes = [plane.view(shape)[:, :padded_len].transpose(1, 2) for plane in own.unbind(0)]
        return planes[0], planes[-1]
