"""Copying scattered blocks side by side, into memory that is reused by every layer and step: fresh pages cost more than the copy.

The buffer holds the keys of all gathered sequences, then their values:  [2, num_blocks, block_size, num_kv_heads, head_dim].
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
    """[num_half_blocks, half_block_width]"""
    target_rows: Tensor
    """The same memory by token, [2 * num_gathered_tokens, num_kv_heads * head_dim]."""
    blank_rows: Tensor
    """Those of them that lie beyond their sequence."""

    def run(self, layer: KVLayer) -> None:
        layer.gather(self.sources, self.target)
        if self.blank_rows.shape[0]:
            self.target_rows.index_fill_(0, self.blank_rows, 0.0)


class GatherBuffer:
    def __init__(self, geometry: AttentionGeometry, dtype: torch.dtype) -> None:
        self._geometry = geometry
        self._row_width = geometry.num_kv_heads * geometry.head_dim
        self.half_block_width = geometry.block_size * self._row_width
        self._memory = torch.empty(0, dtype=dtype)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._geometry.block_size)

    def reserve(self, num_blocks: int) -> None:
        """Make room; grows by doubling. Views made before stay on the old memory."""
        needed = 2 * num_blocks * self.half_block_width
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
        target = self._memory[: 2 * len(blocks) * self.half_block_width].view(-1, self.half_block_width)
        return Gather(
            sources=torch.from_numpy(np.concatenate((2 * blocks, 2 * blocks + 1))),
            target=target,
            target_rows=target.view(-1, self._row_width),
            blank_rows=torch.from_numpy(np.concatenate((blank, blank + first_row))),
        )

    def views(self, first_block: int, num_sequences: int, padded_len: int, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences of equal padded length, whose blocks begin at `first_block` of a gather of `num_blocks`.

        Each [num_sequences, num_kv_heads, padded_len, head_dim].
        """
        geometry = self._geometry
        memory = self._memory[: 2 * num_blocks * self.half_block_width].view(2, num_blocks, -1)
        own = memory[:, first_block : first_block + num_sequences * self.num_blocks_for(padded_len)]
        shape = (num_sequences, -1, geometry.num_kv_heads, geometry.head_dim)
        keys, values = (half.view(shape)[:, :padded_len].transpose(1, 2) for half in own.unbind(0))
        return keys, values
